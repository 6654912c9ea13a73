"""How many ranks a pipeline needs whose first layers are frozen."""

import pytest
import trireme


def _ranks_by_epoch(layers: int, ranks: int, epochs: int, frozen_cost: float) -> list[int]:
    found: list[int] = []
    for frozen in trireme.freeze_schedule(layers, 1 / 3, epochs):
        before = found[-1] if found else None
        plan = trireme.elastic_plan(
            [1.0] * layers, frozen=frozen, ranks=ranks, before=before, frozen_cost=frozen_cost
        )
        assert plan.ranks_per_pipeline * plan.replicas == ranks
        assert sum(plan.balance) == layers
        found.append(plan.ranks_per_pipeline)
    return found


def test_pipeline_shrinks_as_its_layers_freeze() -> None:
    assert _ranks_by_epoch(12, 4, 8, 1 / 6) == [4, 4, 4, 2, 2, 1, 1, 1]
    assert _ranks_by_epoch(12, 4, 5, 0) == [4, 4, 2, 1, 1]
    assert _ranks_by_epoch(24, 8, 9, 1 / 6) == [8, 8, 8, 4, 4, 4, 2, 2, 2]
    assert _ranks_by_epoch(8, 2, 5, 1 / 6) == [2, 2, 1, 1, 1]


def test_plan_is_a_value() -> None:
    plan = trireme.elastic_plan([1.0] * 12, frozen=9, ranks=4)
    assert (plan.ranks_per_pipeline, plan.replicas, plan.balance) == (2, 2, [10, 2])
    assert plan.seconds == pytest.approx(2.5)
    assert repr(plan) == "ElasticPlan(2 x 2 of 10 2 layers)"
    same = trireme.ElasticPlan(ranks_per_pipeline=2, replicas=2, balance=[10, 2])
    assert plan == same and len({plan, same}) == 1
    assert plan != trireme.ElasticPlan(ranks_per_pipeline=2, replicas=2, balance=[9, 3])
    # As many measured seconds as there are layers, in place of a factor.
    costs = [4.0] * 4 + [1.0] * 4
    assert trireme.elastic_plan(costs, frozen=4, ranks=4).ranks_per_pipeline == 1
    slow = trireme.elastic_plan(costs, frozen=4, ranks=4, frozen_cost=[3.0] * 8)
    assert slow.balance == [2, 2, 2, 2]
    tight = trireme.elastic_plan(costs, frozen=4, ranks=4, memory=[10] * 8, limit=39)
    assert tight.ranks_per_pipeline == 4


def test_plan_is_refused_with_its_numbers() -> None:
    with pytest.raises(ValueError, match=r"got 9 frozen layers of 8\. Pass how many"):
        trireme.elastic_plan([1.0] * 8, frozen=9, ranks=4)
    with pytest.raises(ValueError, match="got 3 ranks as first, expected a factor of 4"):
        trireme.elastic_plan([1.0] * 8, frozen=0, ranks=4, first=3)
