"""Which row of the paper's tables a model would be."""

from gdn2.evals.report.paper import FULL, HYBRID, RECURRENT, SCALAR_ERASE, SCALAR_WRITE, WIDE_ERASE
from gdn2.layers.config import AttentionConfig, DeltaConfig, Mamba2Config, Mamba3Config
from gdn2.models.config import ModelConfig

TRANSFORMER = "Transformer"
VARIANTS = {  # by the gates of erasing and writing, and the range of erasing
    ("channel", "channel", 1.0): FULL,
    ("mean", "channel", 1.0): SCALAR_ERASE,
    ("channel", "mean", 1.0): SCALAR_WRITE,
    ("channel", "channel", 2.0): WIDE_ERASE,
}


def family(config: ModelConfig) -> str:
    """The paper's name of the model; that of a hybrid is its recurrent mixer's."""
    recurrent = [mixer for mixer in config.cell if not isinstance(mixer, AttentionConfig)]
    match recurrent[0] if recurrent else config.cell[0]:
        case AttentionConfig():
            return TRANSFORMER
        case Mamba2Config():
            return "Mamba-2"
        case Mamba3Config(rank=rank):
            return "Mamba-3 (SISO)" if rank == 1 else "Mamba-3 (MIMO)"
        case DeltaConfig() as mixer:
            by_decay = {"none": "DeltaNet", "head": "Gated DeltaNet", "channel": "Gated DeltaNet-2"}
            is_kda = (mixer.decay, mixer.gates) == ("channel", "tied")
            name = "KDA" if is_kda else by_decay[mixer.decay]
            return name if VARIANTS.get(_gates(mixer)) == FULL else f"{name}, variant"


def section(config: ModelConfig) -> str:
    """The part of Tables 2 to 4 that the model belongs to."""
    is_attending = any(isinstance(mixer, AttentionConfig) for mixer in config.cell)
    return HYBRID if is_attending else RECURRENT


def title(config: ModelConfig) -> str:
    """The family, and whether it is a hybrid of it."""
    name = family(config)
    is_hybrid = section(config) == HYBRID and name != TRANSFORMER
    return f"{name}, hybrid" if is_hybrid else name


def variant(config: ModelConfig) -> str | None:
    """The row of Table 5 that the model would be, if it would be one."""
    match config.cell:
        case (DeltaConfig(decay="channel", gates="separate") as mixer,):
            return VARIANTS.get(_gates(mixer))
    return None


def _gates(mixer: DeltaConfig) -> tuple[str, str, float]:
    return mixer.erase_gate, mixer.write_gate, mixer.erase_range
