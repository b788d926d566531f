"""What several stages need, built from the configuration in one place: model folder, renderer, verifier, engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pivotrl.config import Config, VerifierConfig
from pivotrl.generation.engine import Engine, Sampling
from pivotrl.io import keeps_books
from pivotrl.models.builtin import resolve_model
from pivotrl.rendering.chat import Renderer
from pivotrl.verifiers.base import Verifier
from pivotrl.verifiers.runner import open_verifier

if TYPE_CHECKING:
    from pivotrl.generation.server_engine import WeightSender


def start_policy(cfg: Config, run_dir: Path) -> Path:
    """pi_0: the warm-up's checkpoint where that stage ran, else the model. The same for profile, train and KL."""
    warm = run_dir / "warmup" / "checkpoint"
    return warm if warm.exists() else resolve_model(cfg.model.path)


@dataclass(frozen=True)
class Workbench:
    cfg: Config
    run_dir: Path
    start_policy: Path  # Hugging Face folder of pi_0
    renderer: Renderer
    verifier: Verifier
    sampling: Sampling

    @classmethod
    def build(cls, cfg: Config, run_dir: Path) -> Workbench:
        """For the stages that start from pi_0."""
        return cls._of(cfg, run_dir, start_policy(cfg, run_dir))

    @classmethod
    def from_model(cls, cfg: Config, run_dir: Path) -> Workbench:
        """For the warm-up, which makes pi_0 from the model."""
        return cls._of(cfg, run_dir, resolve_model(cfg.model.path))

    @classmethod
    def _of(cls, cfg: Config, run_dir: Path, model: Path) -> Workbench:
        s = cfg.sampling
        return cls(
            cfg,
            run_dir,
            model,
            Renderer(model, cfg.model.chat_template, cfg.domain.action_format),
            open_verifier(cfg.domain.verifier),
            Sampling(s.temperature, s.top_p, s.top_k, s.max_new_tokens),
        )

    def training_verifier(self) -> Verifier:
        """What scores rollouts in training: the domain's, which profiled them, or strict equality (naive local RL)."""
        return self.verifier if self.cfg.algorithm.reward == "functional" else open_verifier(VerifierConfig("strict"))

    @contextmanager
    def engine(self, sender: WeightSender | None = None) -> Iterator[Engine]:
        """An engine with pi_0's weights, closed at the end: vLLM in this process, or the server that is configured.

        `sender` carries new weights to a server; without one it keeps what it serves.
        """
        from pivotrl.generation.server_engine import ServerEngine
        from pivotrl.generation.vllm_engine import VllmEngine
        from pivotrl.models.fp8_folder import fp8_copy

        stop, length = list(self.renderer.stop_token_ids), self.cfg.model.context_length
        engine: ServerEngine | VllmEngine
        if self.cfg.generation.server is not None:
            engine = ServerEngine(
                self.cfg.generation.server,
                stop_token_ids=stop,
                max_length=length,
                sender=sender,
                folder=self.start_policy,
                controls=keeps_books(),
                routed_experts=self.cfg.generation.routed_experts,
            )
        else:
            fp8 = self.cfg.precision.engine == "fp8"
            engine = VllmEngine(
                fp8_copy(self.start_policy, self.run_dir / "engine_fp8") if fp8 else self.start_policy,
                self.cfg.generation,
                dtype=self.cfg.precision.engine,
                max_length=length,
                seed=self.cfg.seed,
                stop_token_ids=stop,
            )
        try:
            yield engine
        finally:
            engine.close()
