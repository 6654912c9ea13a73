"""examples/python/train_muon.py: an optimizer of whole matrices, over one rank and over two."""

import re

import pytest

from examples.programs import ROOT, losses, run

MUON = [str(ROOT / "examples" / "python" / "train_muon.py")]


def test_two_ranks_share_the_matrices_and_learn_what_one_learns() -> None:
    alone, together = run(MUON, 1), run(MUON, 2)
    owned = [re.findall(r"owns (\d+) hidden", printed) for printed in (alone, together)]
    assert owned == [["8"], ["4"]]
    assert losses(together)[-1] < 0.7 * losses(together)[0]
    # Muon multiplies in bfloat16.
    assert losses(together) == pytest.approx(losses(alone), rel=1e-2)
