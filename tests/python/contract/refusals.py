"""What our classes say of bad_arguments.py, by table and entry; " ... " is between parts."""

from __future__ import annotations

import re

from harness.faults import HOUSE_FORM, RANKLESS_FORM, message_of

TEXTS: dict[str, dict[str, str]] = {
    "ddp": {
        "no module": "got str as module ... torch.nn.Module",
        "a class": "got type as module",
        "torch's around": "got torch's DistributedDataParallel at '' ... "
        "trireme.DistributedDataParallel, too",
        "meta buffer": "buffer '1.running_mean' on the meta device ... before wrapping",
        "mesh": "'cpu' as device_mesh ... 1-D DeviceMesh",
        "cap 0": "bucket cap of 0 MiB ... positive",
        "cap -1": "bucket cap of -1.5 MiB",
        "cap text": "got str as bucket cap",
        "cap nan": "bucket cap of nan",
        "caps": "bucket cap of 0 MiB",
        "delayed alone": "delay_all_reduce_named_params ... both or neither",
        "group and mesh": "got both process_group and device_mesh",
        "mesh of two dimensions": "as device_mesh ... 1-D DeviceMesh",
        "frozen": "without trainable parameters ... Use the module as it is",
        "no parameters": "without trainable parameters",
        "two ids": "[0, 1] ... one rank per device",
        "ids on the CPU": "device_ids [0] ... cpu ... Leave both",
        "output on the CPU": "output_device 1 ... expected None",
        "several devices": "several kinds of device ... '0.weight' on cpu ... '1.weight' on meta",
        "lazy": "lazy parameter '1.weight' ... Run one forward before wrapping",
        "group of another kind": "got str as process_group",
        "SyncBatchNorm on the CPU": "SyncBatchNorm at '1' on the CPU ... "
        "trireme.SyncBatchNorm.convert_sync_batchnorm(module)",
    },
    "zero": {
        "a method": "got method as params",
        "an empty group": "group without parameters",
        "stage 0": "got stage 0, expected 1 or 2",
        "stage 3": "got stage 3 ... use fully_shard",
        "stage True": "got stage True",
        "stage text": "got stage '2'",
        "overlap": "overlap_with_ddp=True",
        "an instance": "as optimizer_class, expected a subclass of torch.optim.Optimizer",
        "LBFGS": "got LBFGS, which needs all parameters",
        "SparseAdam": "got SparseAdam under stage 2 ... Use stage 1",
        "placement": "got placement 'flat' ... 'whole'",
        "fused": "fused_step=True for stage 2 and AdamW ... trireme.optim.Adam",
        "meta": "[0]' on the meta device ... to_empty(device=...)",
        "devices": "got parameters on several devices ... [1]' on meta ... one device",
        "group": "got str as process_group",
        "no_sync of stage 1": "under stage 1 ... DistributedDataParallel",
        "last step of stage 1": "under stage 1 ... DistributedDataParallel",
        "consolidated on rank 2": "got rank 2 to consolidate on ... Pass 0 to 1",
        "consolidated on rank -1": "got rank -1 to consolidate on ... Pass 0 to 1",
        "a tensor": "got Parameter as params ... parameters()",
        "nothing": "got no parameters, expected at least one",
        "a group without parameters": "group without parameters",
        "twice in a group": "twice ... Give each parameter once",
        "no class": "'SGD' as optimizer_class ... AdamW",
    },
    "fsdp": {
        "a text": "[fully_shard] got str, expected a module",
        "nothing": "got no modules",
        "mesh": "got str as mesh",
        "offload_policy": "got str as offload_policy",
        "mp_policy": "got str as mp_policy",
        "placement 2": "got Shard(dim=2) for '0.weight' of shape (4, 4)",
        "a subclass": "got 'weight' as TwoTensor, a tensor subclass",
        "a subclass that is gathered": "got 'weight' as Gathered, a tensor subclass",
        "averaged": "got a DistributedDataParallel at ' ... averages gradients, too",
        "averaged inside": "got a DistributedDataParallel at ' ... averages gradients, too",
        "traced": "got a ScriptModule at '' ... before it is scripted or traced",
        "torch's": "which is sharded already",
        "outer first": "in an outer unit already ... 'weight'",
        "optimizer of before": "got an optimizer of ... weight ... before fully_shard",
        "assigned": "got a plain tensor for ' ... , expected a DTensor",
        "factor 0.0": "got factor=0.0, expected a number above 0",
        "factor -1.0": "got factor=-1.0, expected a number above 0",
        "factor '2'": "got factor='2', expected a number above 0",
        "factor True": "got factor=True, expected a number above 0",
        "a list": "got a ModuleList, which has no forward",
        "scripted": "got a ScriptModule at '' ... before it is scripted or traced",
        "mesh of three dimensions": "got a mesh of 3 dimensions",
        "reshard to a text": "got reshard_after_forward='yes'",
        "reshard to 3": "got reshard_after_forward=3, expected a factor of 2",
        "placement Replicate": "got Replicate() as placement of '0.weight'",
        "twice": "got FSDPSequential, which is sharded already",
        "sparse": "got 'weight' of layout torch.sparse_coo",
        "meta": "got parameter 'weight' on the meta device ... to_empty",
        "tied to an inner unit": "got '1.weight', which an inner unit ... fully_shard([a, b])",
        "tied units": "got 'weight' of Linear(in_features=4, out_features=4 ... inner unit shares",
        "inner unit first": "got a first forward of FSDPSequential after one of FSDPLinear",
        "two roots": "got 2 modules as the outermost unit",
        "reshard later": "expected a bool",
        "prefetch": "got Tanh, expected an FSDPModule",
        "no buffers": "got max_input_buffers=0",
        "finalizing inside": "got set_manual_backward_finalization() of an inner unit",
        "reset inside": "got reset_iter_state() of an inner unit",
        "nothing to finalize": "got finalize_backward() without manual finalization",
    },
}

# What all texts of a table have.
ALWAYS = {"ddp": "[ddp] got  ... , expected ", "zero": "[zero] got ", "fsdp": "[fully_shard] "}

# What torch takes, or refuses by another type.
ALONE: dict[str, dict[type[Exception], set[str]]] = {
    "ddp": {
        TypeError: {"no module", "a class", "mesh", "cap text"},
        RuntimeError: {"meta buffer"},
        ValueError: {"torch's around", "cap 0", "cap -1", "cap nan", "caps"},
    },
    "zero": {
        TypeError: {"a method", "an instance", "group"},
        RuntimeError: {"meta", "no_sync of stage 1", "last step of stage 1"},
        ValueError: {
            *("an empty group", "stage 0", "stage 3", "stage True", "stage text", "overlap"),
            *("LBFGS", "SparseAdam", "placement", "fused", "devices"),
            *("consolidated on rank 2", "consolidated on rank -1", "twice in a group"),
        },
    },
    "fsdp": {
        TypeError: {"offload_policy", "mp_policy"},
        RuntimeError: {"traced", "optimizer of before"},
        AssertionError: {"placement 2", "torch's"},
        NotImplementedError: {"a subclass", "a subclass that is gathered"},
        ValueError: {
            *("a text", "nothing", "mesh", "averaged", "averaged inside", "outer first"),
            *("assigned", "factor 0.0", "factor -1.0", "factor '2'", "factor True"),
        },
    },
}

# What is found out before the group is known.
GROUPLESS = {
    "ddp": {
        *("no module", "a class", "group of another kind", "mesh", "group and mesh"),
        "mesh of two dimensions",
    },
    "zero": {"group"},
}


def kind_of(table: str, entry: str) -> type[Exception] | None:
    """The type that is ours alone."""
    for kind, entries in ALONE.get(table, {}).items():
        if entry in entries:
            return kind
    return None


def complaint(table: str, entry: str, error: Exception) -> str:
    """What is wrong with the text of an error; nothing, if it is as it should be."""
    said = TEXTS.get(table, {}).get(entry)
    if said is None:
        return ""
    text = message_of(error)
    form: re.Pattern[str] = RANKLESS_FORM if entry in GROUPLESS.get(table, ()) else HOUSE_FORM
    if not form.match(text):
        return f"not in the house form: {text}"
    parts = [*ALWAYS[table].split(" ... "), *said.split(" ... ")]
    missing = [part for part in parts if part not in text]
    return f"{missing} not in: {text}" if missing else ""
