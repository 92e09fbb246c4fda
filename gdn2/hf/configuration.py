"""ModelConfig in the form that transformers reads and writes; both sides read the same config.json."""

# mypy: disable-error-code="no-untyped-call"
from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig

from gdn2.layers.config import DeltaConfig
from gdn2.layers.plain import to_plain
from gdn2.models.config import CONVENTIONAL, ModelConfig
from gdn2.models.folder import MODEL_TYPE, read_config


class Gdn2Config(PreTrainedConfig):
    """The fields of ModelConfig; without arguments, the recurrent Gated DeltaNet-2 of 1.3B.

    `layer_types`, `sliding_window`, `num_attention_heads`, `linear_key_head_dim` and the like follow from the cell.
    They are there to be read: one that contradicts it is a ValueError when a model is made.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (Trainer adds to the list)

    hidden_size: int = 2304
    intermediate_size: int = 6208
    num_hidden_layers: int = 18
    cell: tuple[Any, ...] | list[Any] = (to_plain(DeltaConfig()),)
    vocab_size: int = 32000
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    init_scheme: str = "released"
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        said = {name: kwargs.pop(name) for name in CONVENTIONAL if name in kwargs}
        native = read_config({**self._own(), **said})
        self.cell = native.to_dict()["cell"]
        super().__post_init__(**kwargs)
        for name, value in native.conventional.items():
            setattr(self, name, value)

    @classmethod
    def from_native(cls, config: ModelConfig, **others: Any) -> "Gdn2Config":
        """The same model; `others` are what transformers knows besides."""
        return cls(**config.to_dict(), **others)

    def native(self) -> ModelConfig:
        """The same model; a ValueError where a field was changed to what cannot be."""
        said = {name: getattr(self, name) for name in CONVENTIONAL if hasattr(self, name)}
        return read_config({**self._own(), **said})

    def _own(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(ModelConfig)}
