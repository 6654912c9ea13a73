"""Parameter server: tables that workers pull and push, each at its own pace.

On each host the memory is the server::

    with ps.ParameterServer([ps.Dense("net", net, optimizer=ps.SGD(0.1))], mode="ssp",
                            staleness=2) as server:
        table = server["net"]
        for inputs, targets in loader:
            table.pull()
            loss_of(net(inputs), targets).backward()
            table.push()
            server.clock()
"""

from trireme._core.optimizer_specs import SGD, Adagrad, Adam, AdamW, RowwiseAdagrad, Sum
from trireme.ps.row_inits import Normal, Uniform, Zeros
from trireme.ps.server import ParameterServer, join
from trireme.ps.sparse import Embedding, EmbeddingBag, Sparse, SparseTable
from trireme.ps.tables import Dense, DenseTable, Pending

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Dense",
    "DenseTable",
    "Embedding",
    "EmbeddingBag",
    "Normal",
    "ParameterServer",
    "Pending",
    "RowwiseAdagrad",
    "Sparse",
    "SparseTable",
    "Sum",
    "Uniform",
    "Zeros",
    "join",
]

# Users import them from here, and so they are printed and pickled.
for _one in (
    Dense,
    DenseTable,
    Embedding,
    EmbeddingBag,
    ParameterServer,
    Pending,
    Sparse,
    SparseTable,
    join,
):
    _one.__module__ = __name__
