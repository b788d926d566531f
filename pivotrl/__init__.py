"""PivotRL: turn-level reinforcement learning for agentic LLMs from existing SFT trajectories (arXiv 2603.21383)."""

__version__ = "0.1.0"
