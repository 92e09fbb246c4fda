"""The text side of a run: the tokenizer of its data, samples, and the model folder that `gdn2 generate` reads."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from gdn2.data.byte_tokenizer import BYTES
from gdn2.data.config import CorpusConfig, DataConfig, MixtureConfig, TokensConfig
from gdn2.data.tokenizers import Tokenizer, load_tokenizer
from gdn2.models.config import ModelConfig
from gdn2.models.folder import save_model
from gdn2.models.generate import Stop, generate
from gdn2.models.language_model import LanguageModel
from gdn2.models.sampling import Sampling
from gdn2.training.config import SamplesSection
from gdn2.training.shard import whole_model


def tokenizer_of(data: DataConfig) -> Tokenizer | None:
    """What turns the data's tokens into text; nothing does for synthetic tasks."""
    match data:
        case CorpusConfig():
            return load_tokenizer(BYTES)
        case TokensConfig():
            return load_tokenizer(Path(data.path))
        case MixtureConfig():
            found = (tokenizer_of(part) for part in data.parts)
            return next((tokenizer for tokenizer in found if tokenizer is not None), None)
    return None


def sample(model: LanguageModel, tokenizer: Tokenizer, section: SamplesSection) -> str:
    """The prompt and what the model makes of it, the same for the same weights."""
    (completion,) = generate(
        model,
        [tokenizer.encode(section.prompt)],
        sampling=Sampling(temperature=section.temperature),
        stop=Stop(max_tokens=section.tokens),
        decode=tokenizer.decode,
    )
    return section.prompt + completion.text


def exporter(
    config: ModelConfig, tokenizer: Tokenizer | None
) -> Callable[[Path, dict[str, Tensor]], None]:
    """What writes a model folder from whole weights, with the tokenizer beside them."""

    def export(folder: Path, weights: dict[str, Tensor]) -> None:
        model = whole_model(config, weights)
        if tokenizer is None:
            return save_model(model, folder)
        with TemporaryDirectory() as files:
            tokenizer.save(Path(files))
            return save_model(model, folder, tokenizer=files)

    return export
