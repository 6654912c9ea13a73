"""GPT-2 and BERT of Transformers, made from configurations, under our classes; and its Trainer."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn

from integrations.sides import (
    OURS,
    THEIRS,
    Side,
    assert_close,
    assert_equal_to_theirs,
    run_on,
    state_of,
)

pytest.importorskip("transformers", reason="Transformers is not installed")

import transformers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
)

VOCABULARY, WIDTH = 97, 32


def gpt2() -> nn.Module:
    """Its output layer and its embedding are one parameter. Without dropout, to be compared."""
    torch.manual_seed(3)
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=WIDTH, n_layer=2, n_head=4, use_cache=False,
        bos_token_id=0, eos_token_id=0, pad_token_id=0, **still,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def bert(use_reentrant: bool = False) -> nn.Module:
    """With recomputed activations and a frozen embedding."""
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=32, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.bert.embeddings.token_type_embeddings.requires_grad_(False)
    return model.train()


def bert_reentrant() -> nn.Module:
    return bert(use_reentrant=True)


def bert_ours() -> nn.Module:
    """By our function, on both sides."""
    model = bert()
    model._set_gradient_checkpointing(True, trireme.checkpoint)
    return model


def mixtral() -> nn.Module:
    """Each token goes to one of four experts, so that some may have none."""
    torch.manual_seed(3)
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        num_local_experts=4, num_experts_per_tok=1, output_router_logits=True, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config)


MODELS = {"gpt2": gpt2, "mixtral": mixtral, "bert": bert}
MODELS |= {"bert_reentrant": bert_reentrant, "bert_ours": bert_ours}


def batch(step: int, rank: int, causal: bool) -> dict[str, torch.Tensor]:
    """4 texts of a rank, of other lengths in each step; some are padded."""
    made = torch.Generator().manual_seed(100 * step + rank)
    length = 9 + 2 * step
    ids = torch.randint(1, VOCABULARY, (4, length), generator=made)
    mask = torch.ones_like(ids)
    mask[0, length - 3 :] = 0
    labels = ids.masked_fill(mask == 0, -100) if causal else ids[:, 0] % 3
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


# With a smaller eps Adam would blow up rounding where the gradient is zero, in the biases of keys.
ADAMW = {"lr": 0.01, "eps": 1e-4}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **ADAMW)


def fit(
    model: nn.Module, optimizer: Any, rank: int, causal: bool, no_sync: Any = nullcontext
) -> Any:
    """Losses, and norms of the gradients, of five steps; the third accumulates two batches."""
    losses, norms = [], []
    for step in range(5):
        if step == 2:
            with no_sync():
                model(**batch(9, rank, causal)).loss.backward()
        loss = model(**batch(step, rank, causal)).loss
        loss.backward()
        losses.append(loss.item())
        norm = trireme.clip_grad_norm_(list(model.parameters()), 0.5)
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


def train_ddp(rank: int, side: Side, folder: str, name: str) -> Any:
    dist.init_process_group(side.backend)
    model = side.ddp(MODELS[name]())
    optimizer = adamw(model)
    fitted = fit(model, optimizer, rank, "bert" not in name, model.no_sync)
    return {**fitted, "state": state_of(model.module)}


@pytest.mark.parametrize("name", MODELS)
def test_ddp(tmp_path: Path, name: str) -> None:
    over_gloo = Side("gloo", trireme.DistributedDataParallel)
    sides = {"ours": OURS, "over gloo": over_gloo}
    assert_equal_to_theirs(train_ddp, tmp_path, name, sides=sides)


def train_zero(rank: int, side: Side, folder: str, name: str) -> Any:
    dist.init_process_group(side.backend)
    model = MODELS[name]()
    if side == OURS:
        optimizer = trireme.ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, stage=2, **ADAMW
        )
        fitted = fit(model, optimizer, rank, "bert" not in name, optimizer.no_sync)
    else:
        model = side.ddp(model)
        optimizer = adamw(model)
        fitted = fit(model, optimizer, rank, "bert" not in name, model.no_sync)
        model = model.module
    return {**fitted, "state": state_of(model)}


@pytest.mark.parametrize("name", MODELS)
def test_zero(tmp_path: Path, name: str) -> None:
    assert_equal_to_theirs(train_zero, tmp_path, name, sides={"ours": OURS})


def shard_all(model: nn.Module, fully_shard: Any) -> nn.Module:
    (blocks,) = (module for module in model.modules() if type(module) is nn.ModuleList)
    for block in blocks:
        fully_shard(block)
    return fully_shard(model)


def train_sharded(rank: int, side: Side, folder: str, name: str) -> Any:
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    dist.init_process_group(side.backend)
    ours = side.ddp is trireme.DistributedDataParallel
    model = shard_all(MODELS[name](), trireme.fully_shard if ours else fully_shard)
    optimizer = adamw(model)
    fitted = fit(model, optimizer, rank, "bert" not in name)
    if name == "gpt2":
        register_fsdp_forward_method(model, "generate")
        model.eval()
        prompt = batch(1, 0, True)["input_ids"][:, :5]
        texts = [
            model.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=cached)
            for cached in (True, False)
        ]
        assert torch.equal(*texts)
        fitted["text"] = texts[0]
        model.train()
        fitted["after"] = fit(model, optimizer, rank, True)
    return fitted


@pytest.mark.parametrize("name", MODELS)
def test_fully_shard(tmp_path: Path, name: str) -> None:
    over_gloo = Side("gloo", trireme.DistributedDataParallel)
    sides = {"ours": OURS, "over gloo": over_gloo}
    assert_equal_to_theirs(train_sharded, tmp_path, name, sides=sides)


def grow(rank: int, side: Side, folder: str) -> Any:
    """New tokens in mid-run: the wrapper is made anew for torch's class, and stays for ours."""
    dist.init_process_group(side.backend)
    model = side.ddp(gpt2())
    first = fit(model, adamw(model), rank, True)
    model.module.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
    with torch.no_grad():
        model.module.transformer.wte.weight[VOCABULARY:].fill_(0.01)
    if side == THEIRS:  # the wrapper has to go first: it holds nodes that know the former sizes
        plain = model.module
        del model
        model = side.ddp(plain)
    second = fit(model, adamw(model), rank, True)
    return [first, second, state_of(model.module)]


def test_resized_embeddings(tmp_path: Path) -> None:
    assert_equal_to_theirs(grow, tmp_path, sides={"ours": OURS})


def save(rank: int, side: Side, folder: str) -> Any:
    dist.init_process_group(side.backend)
    model = gpt2()
    shard_all(model, trireme.fully_shard)
    optimizer = adamw(model)
    fit(model, optimizer, rank, True)
    trireme.save_checkpoint(f"{folder}/ck", model, optimizer)
    if rank == 0:
        model.config.save_pretrained(f"{folder}/ck")
    dist.barrier()
    read = GPT2LMHeadModel.from_pretrained(f"{folder}/ck")
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    assert_close(state_of(read), whole, "read", 0)


def test_checkpoint_is_read(tmp_path: Path) -> None:
    """``from_pretrained`` reads what save_checkpoint() wrote of a sharded model."""
    run_on(OURS, save, tmp_path / "ours")


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(1, VOCABULARY, (9,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def trainer_of(side: Side, kind: str) -> type[Trainer]:
    if side == OURS:  # these arrange the process group before TrainingArguments make it
        from trireme.integrations import transformers as ours

        return getattr(ours, kind)
    dist.init_process_group(side.backend)
    return getattr(transformers, kind)


def run_trainer(
    rank: int, side: Side, folder: str, options: dict[str, Any], kind: str = "Trainer"
) -> Any:
    trainer_class = trainer_of(side, kind)
    arguments = getattr(transformers, kind.replace("Trainer", "TrainingArguments"))(
        folder, use_cpu=True, per_device_train_batch_size=4, num_train_epochs=2,
        learning_rate=0.01, max_grad_norm=0.5, logging_steps=1, eval_strategy="epoch",
        save_strategy="epoch", report_to=[], disable_tqdm=True, seed=5, **options,
    )  # fmt: skip
    assert dist.get_backend() == side.backend
    trainer = trainer_class(gpt2(), arguments, train_dataset=Texts(), eval_dataset=Texts())
    trainer.train()
    assert type(trainer.model_wrapped) is side.ddp
    fitted = {"log": log_of(trainer), "state": state_of(trainer.model)}
    first = sorted(Path(folder).glob("checkpoint-*"), key=lambda path: int(path.name[11:]))[0]
    resumed = trainer_class(gpt2(), arguments, train_dataset=Texts(), eval_dataset=Texts())
    resumed.train(resume_from_checkpoint=str(first))
    assert_close(state_of(resumed.model), fitted["state"], "resumed")
    predicted = resumed.predict(Texts())
    return {**fitted, "predicted": torch.tensor(predicted.predictions)}


def log_of(trainer: Trainer) -> list[dict[str, float]]:
    names = ("loss", "grad_norm", "eval_loss", "learning_rate")
    lines = trainer.state.log_history
    return [{name: line[name] for name in names if name in line} for line in lines]


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_accumulation_steps": 2, "bf16": True}, {"gradient_checkpointing": True}],
    ids=["plain", "accumulated", "checkpointed"],
)
def test_trainer(tmp_path: Path, options: dict[str, Any]) -> None:
    kind = "Seq2SeqTrainer" if "gradient_checkpointing" in options else "Trainer"
    assert_equal_to_theirs(run_trainer, tmp_path, options, kind)
