"""`Trainer` takes the steps of our own loop, and PEFT's adapters fit every family."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import Trainer, TrainingArguments

from gdn2.data.batch import Batch
from gdn2.hf.modules import lora_targets, precise_modules
from gdn2.models.presets import preset
from gdn2.training.optimiser import ClippingAdamW
from gdn2.training.step import train_step
from gdn2.training.world import World
from tests.closeness import assert_close
from tests.hf.cases import make, tokens, twin
from tests.layers.cases import MIXERS
from tests.models.cases import EVERYTHING, config

STEPS, ROWS, LENGTH, LR, CLIP = 10, 4, 12, 1e-2, 0.5
ONE_PROCESS = World(0, 1, torch.device("cpu"), None)


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The rows of all steps, in order."""

    def __len__(self) -> int:
        return STEPS * ROWS

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        row = tokens(1, LENGTH, seed=i)[0].cumsum(0) % 23
        return {"input_ids": row, "labels": row}


class InOrder(Trainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(Rows())


def arguments(folder: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS // 2,
        gradient_accumulation_steps=2,
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=CLIP,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )


def test_ten_trainer_steps_are_ten_of_our_own(tmp_path: Path) -> None:
    native = make(config(*(MIXERS[name] for name in ("gdn2", "mamba2", "window")))).float()
    model = twin(native).train()
    optimiser = torch.optim.AdamW(model.param_groups(0.1), lr=LR)
    trainer = InOrder(
        model, arguments(tmp_path), train_dataset=Rows(), optimizers=(optimiser, None)
    )
    trainer.train()
    theirs = [line["loss"] for line in trainer.state.log_history if "loss" in line]

    ours = []
    optimiser = ClippingAdamW(native.param_groups(0.1), lr=LR, fused=True)
    rows = [Rows()[i] for i in range(len(Rows()))]
    for step in range(STEPS):
        ids = torch.stack([rows[step * ROWS + i]["input_ids"] for i in range(ROWS)])
        batches = [Batch(x[:, :-1], x[:, 1:], None) for x in ids.split(ROWS // 2)]
        result = train_step(native, optimiser, ONE_PROCESS, batches, lr=LR, clip=CLIP)
        ours.append(result.loss)
    assert ours[-1] < ours[0] - 0.1
    assert_close("losses", torch.tensor(theirs), torch.tensor(ours), 1e-5)
    for name, parameter in native.named_parameters():
        assert_close(name, model.get_parameter(name), parameter, 1e-5)
    every = torch.stack([row["input_ids"] for row in rows])
    expected = native(every[:, :-1], targets=every[:, 1:]).loss
    assert expected is not None
    found = trainer.evaluate(Rows())["eval_loss"]
    assert_close("evaluation", torch.tensor(found), expected, 1e-5)


@pytest.mark.parametrize("name", MIXERS)
def test_adapters_train_alone_and_merge(name: str) -> None:
    """On every linear map of the blocks; nothing else moves, and the merged model is the adapted one."""
    chosen = config(MIXERS[name])
    model, ids = twin(make(chosen)), tokens(2, 9)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    adapted: Any = get_peft_model(model, LoraConfig(r=2, target_modules=lora_targets(chosen)))
    maps = [n for n, m in make(chosen).named_modules() if isinstance(m, torch.nn.Linear)]
    assert {n for n, _ in adapted.named_modules() if n.endswith("lora_A")} == {
        f"base_model.model.{n}.lora_A" for n in maps if n != "head"
    }
    trained = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    assert all("lora_" in n for n in trained)
    optimiser = torch.optim.AdamW(trained.values(), lr=0.1)
    for _ in range(2):  # the second matrix of an adapter begins at zero
        adapted(ids, labels=ids).loss.backward()
        optimiser.step()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in trained.values())
    found = adapted.eval()(ids).logits
    prompt = {"input_ids": ids[:1], "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    written = adapted.generate(**prompt)  # one token at a time, where plain maps take a shorter way
    with adapted.disable_adapter():
        plain = adapted(ids).logits
    merged = adapted.merge_and_unload()
    assert_close("merged", merged(ids).logits, found, 1e-10)
    assert torch.equal(merged.generate(**prompt), written)
    assert not torch.allclose(plain, found)
    own = dict(merged.named_parameters())
    moved = {n for n, value in before.items() if not torch.equal(own[n], value)}
    assert moved == {f"{n}.weight" for n in maps if n != "head"}


def test_the_lists_of_modules_are_the_published_ones() -> None:
    assert lora_targets(preset("gdn2-1m-hybrid")) == [
        *("mixer.decay_proj.down", "mixer.decay_proj.up", "mixer.erase_proj"),
        *("mixer.gate_proj.down", "mixer.gate_proj.up", "mixer.k_proj", "mixer.out_proj"),
        *("mixer.q_proj", "mixer.v_proj", "mixer.write_proj"),
        *("mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"),
    ]
    precise = {
        "gdn2-1m": ["head", "mixer.decay_proj.down", "mixer.decay_proj.up", "mixer.erase_proj"],
        "gdn-1m": ["head", "mixer.beta_proj", "mixer.decay_proj"],
        "mamba3-siso-1m": ["head", "mixer.in_proj"],
        "transformer-1m": ["head"],
    }
    assert {name: precise_modules(preset(name)) for name in precise} == precise
    tied = replace(EVERYTHING, tie_word_embeddings=True)
    assert "head" not in precise_modules(tied) + lora_targets(tied)


def test_labels_are_shifted_where_they_are_smoothed(tmp_path: Path) -> None:
    """Else a model would learn to say its input again."""
    model, ids = twin(make(config(MIXERS["gdn2"]))), tokens(2, 9)
    options = replace(arguments(tmp_path), label_smoothing_factor=0.25)
    found: Any = Trainer(model, options).compute_loss(model, {"input_ids": ids, "labels": ids})
    log = model(ids).logits[:, :-1].log_softmax(-1)
    likelihood = log.gather(-1, ids[:, 1:, None]).squeeze(-1)
    expected = -(0.75 * likelihood + 0.25 * log.mean(-1)).mean()
    assert_close("loss", found, expected, 1e-6)
