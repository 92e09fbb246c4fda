"""The models as Hugging Face's: importing this registers them with the Auto classes."""

# mypy: disable-error-code="no-untyped-call"
try:
    import transformers  # noqa: F401
except ImportError as reason:
    raise ImportError(f'gdn2.hf: {reason}; pip install "gdn2[hf]"') from None

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gdn2.hf.cache import Gdn2Cache
from gdn2.hf.configuration import Gdn2Config
from gdn2.hf.layer import load_layer
from gdn2.hf.modeling import Gdn2ForCausalLM, Gdn2Model

__all__ = ["Gdn2Cache", "Gdn2Config", "Gdn2ForCausalLM", "Gdn2Model", "load_layer"]

AutoConfig.register(Gdn2Config.model_type, Gdn2Config)
AutoModel.register(Gdn2Config, Gdn2Model)
AutoModelForCausalLM.register(Gdn2Config, Gdn2ForCausalLM)
# By this name Trainer knows that labels are to be shifted where it smooths them.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[Gdn2Config.model_type] = Gdn2ForCausalLM.__name__
AutoTokenizer.register(Gdn2Config, fast_tokenizer_class=PreTrainedTokenizerFast)
