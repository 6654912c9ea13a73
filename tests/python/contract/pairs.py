"""The table *part x part*: what a model, a loss or a program brings, and what runs it.

Each cell of GRID is "+", which is right: outputs, losses, gradients and what is saved equal those
of one process on whole batches. Or it names an entry of CELLS: what refuses it and with which text,
why there is no such pair, or what a program has to do so that it is right. test_pairs.py fills
every cell; scripts/together.py writes docs/together.md from this file, which needs no torch.

A new part enters here first: a row of pair_rows.py, or a column of pair_columns.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Right:
    """Right, if a program does this."""

    how: str


@dataclass(frozen=True)
class Refused:
    """Raises on all ranks what has these parts, with " ... " between them."""

    text: str
    instead: str
    kind: str = "ValueError"
    on_all: bool = True
    """Whether every rank raises, or only the one that asks."""


@dataclass(frozen=True)
class NoPair:
    """Means nothing."""

    why: str


Cell = Right | Refused | NoPair

# Columns: the words of the page, and where it says more of them.
COLUMNS = {
    "DDP": "ddp.md",
    "ZeRO 1": "zero.md",
    "ZeRO 2": "zero.md",
    "fully_shard": "fsdp.md",
    "fully_shard, gathered": "fsdp.md#gathered-parameters",
    "DDP, compressed": "compression.md",
    "fully_shard, compressed": "compression.md",
    "DataParallel": "data_parallel.md",
    "Pipeline, ranks": "pipeline.md",
    "Pipeline, threads": "pipeline.md#in-one-process",
    "pipelining": "pipeline.md#torchs-names",
    "PipeTransformer": "pipetransformer.md",
    "LocalSGD": "local_sgd.md",
    "Horovod": "horovod.md",
    "checkpoint": "activation_memory.md",
    "remote owner": "remote.md#modules",
    "worker": "parameter_server.md",
    "save_checkpoint": "checkpoint.md",
    "Join": "ddp.md",
}

GRID = """
row                                            DD Z1 Z2 FS FG DC FC DP PR PT PS EL LS HV CK RO WK SV JN
`ps.Embedding`, bsp                            +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +
`ps.EmbeddingBag`, ssp                         +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +
`ps.Embedding`, async                          +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +
a layer whose parameters are a dense table     +  +  +  T1 T1 +  T1 +  +  +  +  E1 Q1 +  +  T2 T3 +  +
`remote.Module`                                +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +
a remote function that calls it                +  +  +  +  C1 +  +  +  C1 +  C1 C1 +  +  +  +  +  +  J1
SyncBatchNorm                                  +  +  +  +  +  +  +  D2 P1 S1 P1 E2 +  +  +  S2 +  +  J2
BatchNorm                                      +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +
a loss with parameters                         +  +  +  +  +  +  +  L1 +  +  L2 E3 +  +  +  +  +  +  +
a first layer that works in place              +  +  +  +  +  +  +  +  +  +  +  +  +  +  I1 +  +  +  +
tied parameters                                +  +  +  +  +  +  +  +  +  +  P2 E4 +  +  +  +  +  +  +
frozen parameters                              +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +
`Freeze`                                       +  +  +  +  +  +  +  +  +  +  R1 +  +  +  +  R2 +  +  J3
`checkpoint()`                                 +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +
`checkpoint(offload=)`                         +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +
torch's `checkpoint`                           +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +
`saved_tensors_hooks` around it                +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  H1 +  +  +
`save_on_cpu` around it                        +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  H1 +  +  +
autocast                                       +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +
GradScaler                                     +  +  +  +  +  +  +  +  G1 G1 G2 E0 +  +  +  G3 G4 +  +
`no_sync`                                      +  +  +  +  +  +  +  N1 +  +  N1 E5 N1 V1 +  N1 N1 +  +
hooks of parameters                            +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +
`get_extra_state`                              +  +  +  +  +  +  +  +  +  +  +  E6 +  +  +  X1 +  X2 +
`_save_to_state_dict` of its own               +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  X3 +
complex parameters                             +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  W1 +  +
tensors negated or conjugated lazily           +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +
sparse gradients                               +  +  +  +  +  K1 K1 +  +  +  +  +  +  +  +  +  W2 +  +
`torch.compile`                                +  +  +  +  +  +  +  D3 +  +  +  +  +  +  +  +  +  +  +
`inference_mode`                               +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +
several threads of the user's                  +  +  +  +  C1 +  +  +  C1 +  C1 C1 +  +  +  +  +  +  C1
DistributedDataParallel inside                 +  +  Z2 F2 F2 +  F2 D3 P4 P3 P4 E7 Q2 V2 +  O1 +  +  +
`load_state_dict` in `writing()`               +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +  +
`load_state_dict(assign=True)` in `writing()`  A1 +  +  A1 A1 A1 A1 A1 A1 A1 A1 E8 Q3 A1 A1 +  W3 A1 A1
`to()` in `writing()`                          +  +  +  +  +  +  +  +  +  +  +  E9 +  +  +  +  +  +  +
"""  # noqa: E501

CELLS: dict[str, Cell] = {
    "T1": Refused(
        "[ps] got other parameters in the module of table 'layer' than it was made of",
        "Make the table of a layer that fully_shard leaves alone: shard the other layers one by "
        "one, and give `fully_shard(model, ignored_params=...)` the table's parameters.",
        "RuntimeError",
    ),
    "T2": Refused(
        "[remote] got '0.weight' of a table of a server in a module of a factory",
        "The owner keeps gradients for callers, while a table takes them from `.grad`: leave out "
        "one of them.",
    ),
    "T3": Refused(
        "[ps] got '0.weight' for table 'model', which another table keeps",
        "Give each parameter to one table.",
    ),
    "C1": Right(
        "A forward needs all ranks there, so threads and callers take turns, in one order on all "
        "ranks."
    ),
    "E0": Right("`run.scale_losses(scaler)` in place of all calls of the scaler."),
    "E1": Refused(
        "[pipetransformer] got ... 0.weight', which a parameter server keeps",
        "Give the run layers whose parameters its optimizer steps.",
    ),
    "E2": Refused(
        "[pipetransformer] got a SyncBatchNorm at ... whose ranks change from plan to plan",
        "Keep BatchNorm, whose statistics are those of a micro-batch.",
    ),
    "E3": Refused(
        "[pipetransformer] got a loss with parameters",
        "Put them into the last layer.",
    ),
    "E4": Refused(
        "[pipetransformer] got ... expected no layer to share a tensor with another one",
        "Put both into one layer, which is a list of modules.",
    ),
    "E5": NoPair("A step has its whole batch: `global_batch` says how large it is."),
    "E6": Refused(
        "[pipetransformer] got ... with a get_extra_state()",
        "Keep it in buffers, which move with their layer.",
    ),
    "E7": Refused(
        "[pipetransformer] got a DistributedDataParallel at '0.0'",
        "Give the layer in it: a run averages over the replicas of its plan.",
    ),
    "E8": Refused(
        "[pipetransformer] got assign=True",
        "Load with `assign=False`.",
    ),
    "E9": Refused(
        "[pipetransformer] got a run to move or cast",
        "Move or cast the layers before the run is made.",
    ),
    "J1": NoPair("Steps that another rank asks for have no inputs that could run out."),
    "J3": Refused(
        "[host_group] ranks do not agree about collective ... 'freezing'",
        "Call `advance()` behind `join()`, where all ranks are again.",
        "DistBackendError",
    ),
    "R1": NoPair(
        "A rank's own stages are all that it has, and their layers do not begin at the input: "
        "make a Freeze of a `trireme.Pipeline`."
    ),
    "R2": NoPair("The parameters are the owner's, which a program on its rank may freeze."),
    "D2": Refused(
        "[data_parallel] got a SyncBatchNorm at '1', expected plain modules",
        "Run ranks under DDP, or keep BatchNorm, whose statistics are those of a replica's part.",
    ),
    "P1": Right(
        "The layer gets a group of the ranks that have the same stage: "
        "`convert_sync_batchnorm(model, group)`. Ranks of other stages never come to it."
    ),
    "S1": Right(
        "One process is its only rank, so it is a BatchNorm of micro-batches. Over several ranks "
        "it is refused."
    ),
    "S2": Right(
        "The layer gets a group of the owner alone: `convert_sync_batchnorm(model, group)`. Ranks "
        "that only call never come to it."
    ),
    "J2": Refused(
        "[ddp] got SyncBatchNorm at '1' under join()",
        "Give ranks without inputs empty batches, or pass `throw_on_early_termination=True`.",
    ),
    "L1": Right(
        "A module that has the loss as a layer is what is replicated; it returns one loss for each "
        "replica, of which you take the mean. `loss=` refuses a loss with parameters."
    ),
    "L2": Right(
        "`loss_fn=` gets the module, and the last rank's optimizer its parameters. As under torch, "
        "their gradients are sums: divide them by the number of micro-batches."
    ),
    "I1": Refused(
        "one of the variables needed for gradient computation has been modified by an inplace "
        "operation",
        "Leave the layer out of the checkpoint, or give the checkpoint a copy of the input.",
        "RuntimeError",
    ),
    "P2": NoPair(
        "Each rank makes its own stages, which nobody compares: `trireme.Pipeline` keeps what "
        "layers of several ranks share equal."
    ),
    "P3": Refused(
        "[pipeline] got a layer in DistributedDataParallel in a pipeline in one process",
        "Wrap the pipeline, or use ranks.",
        "NotImplementedError",
    ),
    "P4": Right("Its group has the ranks with the same stage, which average over their copies."),
    "O1": Right(
        "Its group has the owner alone. A factory whose module averages over several ranks is "
        "refused, since gradients are kept apart for each caller."
    ),
    "H1": NoPair("What a forward saves is kept at the owner, and hooks of its caller stay here."),
    "G1": Right("`pipe.scale_losses(scaler)` in place of `scaler.scale(loss)`."),
    "G2": NoPair("torch's schedules know no scaler: `trireme.Pipeline` does, by `scale_losses`."),
    "G3": Right(
        "Parameters of the owner keep their gradients there, where the scaler cannot divide them. "
        "So take the scale out before the gradient leaves: "
        "`output.register_hook(lambda gradient: gradient / scaler.get_scale())`."
    ),
    "G4": Right("`table.push(scale=1 / scaler.get_scale())`."),
    "N1": Right("There is nothing to leave out: gradients of several backwards add up."),
    "X1": Refused(
        "[remote] got '0._extra_state' in a state dict, which is no tensor",
        "Training is right. Keep extra state in buffers, if callers save the module.",
        "TypeError",
        on_all=False,
    ),
    "X2": Refused(
        "[saving] got '0' with a get_extra_state()",
        "Keep it in buffers, or save it as `extra`.",
    ),
    "X3": Refused("[saving] got '0'", "Keep what is saved in parameters and buffers."),
    "W1": Refused(
        "[ps] got table 'model' with '0.phase' of dtype",
        "Keep the real and the imaginary part, `torch.view_as_real(parameter)`.",
    ),
    "W2": Refused(
        "[ps] push: got a gradient of layout Sparse for '0.table.weight'",
        "`sparse=False` in the layer, or a sparse table for its rows.",
    ),
    "K1": Refused(
        "[compression] got sparse gradients of ... table.weight', expected dense ones",
        "`sparse=False` in the layer: codes are made of dense gradients.",
    ),
    "W3": Refused(
        "[ps] got other parameters in the module of table 'model' than it was made of",
        "Load with `assign=False`.",
        "RuntimeError",
    ),
    "Z2": Refused(
        "[zero] got stage 2 for '0.module.weight', which DistributedDataParallel averages",
        "Leave the inner one out, or take stage 1.",
    ),
    "F2": Refused(
        "[fully_shard] got a DistributedDataParallel at ''",
        "Shard the module in it.",
    ),
    "D3": Refused(
        "[data_parallel] got a ... at '0', expected plain modules",
        "Wrap the replicated module: `torch.compile` and DistributedDataParallel come last.",
    ),
    "Q1": Refused(
        "[local_sgd] got '0.weight', which a parameter server keeps",
        "Leave that module out of the rounds.",
    ),
    "Q2": Refused(
        "[local_sgd] got across with rank ... which a strategy keeps equal with this one",
        "Its group has the ranks of one worker.",
    ),
    "Q3": Refused(
        "[local_sgd] got ... which was replaced",
        "Load with `assign=False`, or make optimizer and rounds after loading.",
    ),
    "V1": Right(
        "`backward_passes_per_step` in its place: passes add up, and are reduced with the last one."
    ),
    "V2": Refused(
        "[horovod] got parameters of a module in DistributedDataParallel",
        "Give the optimizer parameters of the plain module.",
    ),
    "A1": Right(
        "As in torch, an optimizer does not know parameters that were assigned: make it after "
        "loading."
    ),
}


def grid() -> dict[tuple[str, str], str]:
    """What GRID has for each row and column."""
    found = {}
    for line in GRID.strip().splitlines()[1:]:
        cells = line.split()[-len(COLUMNS) :]
        row = line.removesuffix(line[line.index("  ") :]).strip()
        found |= {(row, column): cell for column, cell in zip(COLUMNS, cells, strict=True)}
    return found


def cell_of(row: str, column: str) -> Cell:
    """What is expected of a pair."""
    name = grid()[row, column]
    return Right("") if name == "+" else CELLS[name]
