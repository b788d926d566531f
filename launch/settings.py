"""`python -m launch.settings [overrides]`: the settings that launch/job.sh evaluates in slurm/*.sh."""

from __future__ import annotations

import sys

from launch.render import conflicts, settings
from pivotrl.configuration import load_config
from pivotrl.errors import UserError


def main() -> int:
    try:
        cfg = load_config(sys.argv[1:])
        if found := conflicts(cfg):
            raise UserError("\n  ".join(found))
    except UserError as error:
        print(f"pivotrl: {error}", file=sys.stderr)
        return 2
    print(settings(cfg))
    return 0


if __name__ == "__main__":
    sys.exit(main())
