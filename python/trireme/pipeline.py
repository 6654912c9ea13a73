"""A model whose layers are dealt out to ranks, and what such a cut takes."""

from trireme._pipeline.measure import MeasuredLayer, measure_layers
from trireme._pipeline.pipeline import Pipeline
from trireme._pipeline.schedule import ElasticPlan, elastic_plan, partition, pipeline_schedule

__all__ = [
    "ElasticPlan",
    "MeasuredLayer",
    "Pipeline",
    "elastic_plan",
    "measure_layers",
    "partition",
    "pipeline_schedule",
]
