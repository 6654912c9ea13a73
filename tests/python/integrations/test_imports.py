"""What imports what, and which versions are tested."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from trireme.integrations import tested_versions
from trireme.integrations.tested_versions import TESTED, say_if_untested

ROOT = Path(__file__).resolve().parents[3]
FRAMEWORKS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "ray")
FRAMEWORKS += ("transformers", "trireme.integrations")


def imported_by(program: str) -> str:
    """Which of the frameworks a fresh interpreter has then."""
    program += f"; import sys; print([one for one in {FRAMEWORKS} if one in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )
    return done.stdout.strip()


def test_trireme_imports_none() -> None:
    assert imported_by("import trireme; trireme.fully_shard, trireme.save_checkpoint") == "[]"


def test_the_older_packages_of_lightning() -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed")
    program = """import pytorch_lightning, lightning_fabric
from trireme.integrations import lightning as ours
assert isinstance(pytorch_lightning.Trainer(
    accelerator="cpu", devices=2, strategy="trireme_ddp", logger=False).strategy, ours.DDPStrategy)
assert isinstance(lightning_fabric.Fabric(
    accelerator="cpu", devices=2, strategy="trireme_fsdp").strategy, ours.FabricFSDPStrategy)
assert issubclass(ours.FSDPStrategy, pytorch_lightning.strategies.ModelParallelStrategy)
"""
    program = f"exec({program!r})"
    found = "['lightning_fabric', 'pytorch_lightning', 'transformers', 'trireme.integrations']"
    assert imported_by(program) == found


def test_tested_versions_are_those_that_are_installed_for_tests() -> None:
    listed = (ROOT / "scripts" / "integration_tools.txt").read_text()
    for package, version in re.findall(r"^([\w-]+)~=(\d+\.\d+)\.\d+$", listed, re.M):
        assert TESTED.get(package, version) == version, package
    assert {"lightning", "accelerate", "transformers"} < set(re.findall(r"^[\w-]+", listed, re.M))


def test_another_version_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested_versions, "version_of", lambda package: "9.9.1")
    monkeypatch.setattr(tested_versions, "_said", set())
    said = r"\[integrations\] got lightning 9\.9\.1, expected 2\.6, with which"
    with pytest.warns(UserWarning, match=said):
        say_if_untested("lightning")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        say_if_untested("lightning")
        monkeypatch.setattr(tested_versions, "_said", set())
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        say_if_untested("lightning")


def test_the_tested_versions_say_nothing() -> None:
    for package in ("lightning", "accelerate", "transformers"):
        pytest.importorskip(package, reason=f"{package} is not installed")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            say_if_untested(package)
