"""What every backend is told, apart from the model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerSettings:
    """Names as the flags have them; ``lr_warmup_iters`` counts optimizer steps of a linear warm-up."""

    optimizer: str = "adam"
    lr: float = 1e-6
    lr_warmup_iters: int = 0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
