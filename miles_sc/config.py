"""What the loss and the rollout side need to know of a run, built once from its flags."""

from dataclasses import dataclass

from miles_sc.loss.score_centering.importance_sampling import MODES

LOSS_TYPE = "score_centering"
LARGEST_FLOAT = 3e38  # what float32 tensors can be compared with


@dataclass(frozen=True)
class ScoreCenteringConfig:
    """What the loss and the rollout side need to know, built once from a namespace.

    Attributes:
        top_logprobs_num: K, candidates recorded per generated token; 0 is off.
        importance_sampling: weight function f: ``none``, ``tis`` or ``mis``.
        tis_clip: cap of a truncated weight.
        mis_low, mis_high: inclusive band of a masked weight.
        temperature, top_p, top_k: the sampler; ``top_k = -1`` is unfiltered.
    """

    top_logprobs_num: int = 0
    importance_sampling: str = "none"
    tis_clip: float = 2.0
    mis_low: float = 0.5
    mis_high: float = 5.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1

    def __post_init__(self) -> None:
        _check_integer("--rollout-top-logprobs-num", self.top_logprobs_num, minimum=0)
        if self.importance_sampling not in MODES:
            raise ValueError(f"--score-centering-is {self.importance_sampling}: choose one of {', '.join(MODES)}")
        if not _is_positive(self.tis_clip):
            raise ValueError(f"--score-centering-tis-clip {self.tis_clip}: set a finite number above 0, e.g. 2.0")
        if not (_is_positive(self.mis_low) and _is_positive(self.mis_high) and self.mis_low <= self.mis_high):
            raise ValueError(
                f"--score-centering-mis-low {self.mis_low} --score-centering-mis-high {self.mis_high}: "
                "set finite numbers with 0 < low <= high, e.g. 0.5 and 5.0"
            )
        if not _is_positive(self.temperature):
            raise ValueError(
                f"--rollout-temperature {self.temperature}: set a finite number above 0 (greedy cannot be trained on)"
            )
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"--rollout-top-p {self.top_p}: set a number in (0, 1]")
        _check_integer("--rollout-top-k", self.top_k, minimum=-1)
        if self.top_k == 0:
            raise ValueError("--rollout-top-k 0: set -1 for no limit, or a positive count")
        if self.top_p < 1 and self.top_k < 1:
            raise ValueError(
                f"--rollout-top-p {self.top_p} without --rollout-top-k: the support that is recorded needs a bound; "
                "set a positive --rollout-top-k, e.g. 64, or sample unfiltered (--rollout-top-p 1.0)"
            )
        if self.mode == "support" and 0 < self.top_logprobs_num < self.top_k:
            raise ValueError(
                f"--rollout-top-logprobs-num {self.top_logprobs_num} is smaller than --rollout-top-k {self.top_k}: "
                f"the whole support is recorded, so set --rollout-top-logprobs-num to at least {self.top_k}"
            )

    @classmethod
    def from_args(cls, args: object) -> "ScoreCenteringConfig":
        """Reads a namespace that holds the flags of :mod:`miles_sc.arguments` and the sampler's; an absent one has its default.

        Raises:
            ValueError: a value out of range; the flag, the value and the remedy are named.
        """
        return cls(
            top_logprobs_num=getattr(args, "rollout_top_logprobs_num", 0),
            importance_sampling=getattr(args, "score_centering_is", "none"),
            tis_clip=getattr(args, "score_centering_tis_clip", 2.0),
            mis_low=getattr(args, "score_centering_mis_low", 0.5),
            mis_high=getattr(args, "score_centering_mis_high", 5.0),
            temperature=getattr(args, "rollout_temperature", 1.0),
            top_p=getattr(args, "rollout_top_p", 1.0),
            top_k=getattr(args, "rollout_top_k", -1),
        )

    @property
    def estimator_settings(self) -> dict[str, object]:
        """The keyword arguments of :func:`miles_sc.score_centering_loss`."""
        return {name: getattr(self, name) for name in ("importance_sampling", "tis_clip", "mis_low", "mis_high")}

    @property
    def mode(self) -> str:
        """``support`` where sampling is filtered (its support is replayed in training), else ``selected``."""
        return "support" if self.top_p < 1 or self.top_k > 0 else "selected"

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuses a K that the model cannot give; a real SGLang server dies on such a request."""
        if self.mode == "selected" and self.top_logprobs_num > vocab_size:
            raise ValueError(
                f"--rollout-top-logprobs-num {self.top_logprobs_num} exceeds the model's vocabulary of {vocab_size}: "
                f"set it to at most {vocab_size}"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST_FLOAT


def _is_positive(value: object) -> bool:
    return _is_number(value) and value > 0


def _check_integer(flag: str, value: object, *, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{flag} {value!r}: set a whole number of at least {minimum}")
