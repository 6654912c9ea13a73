"""benchmarks/bench_hosts.py: bytes beside torch's, and the page; a run of one side for real."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from harness.network_hosts import skip_without_namespaces

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import bench_hosts
import readme_results
from bench_hosts import HostsRun
from measure import hosts_run
from measure.bad_input import BadInput
from measure.ranks import RankFailed
from measure.sides import Side

MADE_UP = {
    "fsdp": HostsRun(500.0, [100.0, 110.0]),
    "torch-fsdp2": HostsRun(1500.0, [300.0, 330.0]),
    "torch-fsdp2, kept": HostsRun(1200.0, [200.0, 200.0]),
}


def test_bytes_and_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_hosts, "run_on_hosts", lambda side, _: MADE_UP[side.label])
    monkeypatch.setattr(readme_results, "RESULTS", tmp_path)
    assert "No run is committed yet" in readme_results.written("docs/multi_host.md")
    assert bench_hosts.main(["--json", str(tmp_path / "hosts.json")]) == 0
    found = json.loads((tmp_path / "hosts.json").read_text())["workloads"]["mlp"]
    assert [len(runs) for runs in found["runs"].values()] == [5, 5, 5]
    verdicts = {label: ratio["verdict"] for label, ratio in found["bytes_ratios"].items()}
    assert verdicts == {"torch-fsdp2": "met", "torch-fsdp2, kept": "missed"}
    page = readme_results.written("docs/multi_host.md")
    assert "| fsdp | 100.0 | 110.0 |  | 500 |" in page
    assert "| torch-fsdp2, kept | 200.0 | 200.0 | 0.53 | 1200 |" in page


def test_what_goes_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "examples" / "two_hosts.sh"
    script.parent.mkdir()
    monkeypatch.setattr(hosts_run, "ROOT", tmp_path)
    script.write_text("echo 'network namespaces are not possible here' >&2; exit 3")
    with pytest.raises(BadInput, match="namespaces are not possible here"):
        bench_hosts.run_on_hosts(bench_hosts.OURS, 1)
    script.write_text("echo 'out of luck' >&2; exit 1")
    with pytest.raises(RankFailed, match=r"\[bench_hosts\] fsdp: a rank failed(.|\n)*out of luck"):
        bench_hosts.run_on_hosts(bench_hosts.OURS, 1)
    script.write_text("exit 0")  # now nobody says anything
    with pytest.raises(RankFailed):
        bench_hosts.run_on_hosts(bench_hosts.OURS, 1)


def test_ranks_that_never_talk_send_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_namespaces()
    monkeypatch.setattr(bench_hosts, "RANKS_PER_HOST", 1)
    try:
        run = bench_hosts.run_on_hosts(Side("no sync", "no-sync", {}), 1)
    except BadInput as error:
        pytest.skip(str(error))
    assert run.step_ms > 0
    assert all(0 <= sent < 0.1 for sent in run.sent_mb)
