"""Programs of other libraries; `make test` runs them in an environment that has these."""

from harness.processes import preload

# Each of them takes seconds to import, once per server and not once per rank.
preload("lightning.pytorch", "accelerate", "transformers", "transformers.models.gpt2.modeling_gpt2")
preload("transformers.models.bert.modeling_bert", "transformers.trainer")
