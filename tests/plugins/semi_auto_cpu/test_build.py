"""Compiling the library: its name and place, one compiler for many processes, what a user is told where it fails."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plugins.errors import ClusterError
from plugins.semi_auto_cpu import build

COMPILER = """#!{python}
import pathlib, sys, time
with open({log!r}, "a") as log:
    log.write("called\\n")
time.sleep(0.5)
sys.stderr.write({words!r})
if {code}:
    sys.exit({code})
pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_text("library")
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A PATH with nothing but a stand-in for g++, and a cache of this test's own."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def install(code=0, words=""):
        text = COMPILER.format(python=sys.executable, log=str(tmp_path / "log"), words=words, code=code)
        (tmp_path / "bin" / "g++").write_text(text)
        (tmp_path / "bin" / "g++").chmod(0o755)
        return tmp_path / "log"

    return install


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_it_is_compiled_once_and_said_in_one_line(compiler, capsys):
    log = compiler()
    first = build.ensure()
    assert first.read_text() == "library" and len(capsys.readouterr().err.splitlines()) == 1
    assert build.ensure() == first and capsys.readouterr().err == ""
    assert log.read_text() == "called\n"
    assert files(first.parent) == sorted([first.name, "lock"])


def test_processes_that_ask_at_once_compile_once(compiler):
    log = compiler()
    ask = "from plugins.semi_auto_cpu import build; print(build.ensure())"
    root = Path(build.__file__).resolve().parents[2]

    def one(_):
        return subprocess.run([sys.executable, "-c", ask], cwd=root, capture_output=True, text=True, check=True).stdout

    with ThreadPoolExecutor(3) as pool:
        paths = set(pool.map(one, range(3)))
    assert len(paths) == 1 and log.read_text() == "called\n"


def test_a_missing_compiler_is_named(compiler):
    with pytest.raises(ClusterError, match=r"g\+\+ is not installed.*apt-get install g\+\+"):
        build.ensure()


def test_a_failing_compiler_is_quoted_and_leaves_nothing(compiler):
    compiler(code=1, words="In file included from x:\nkernel.cc:9:1: error: no type named 'KernelTensor'\n1 note\n")
    with pytest.raises(ClusterError) as caught:
        build.ensure()
    told = str(caught.value)
    assert "does not compile against MindSpore 2." in told and "constraints.txt" in told
    assert told.endswith("kernel.cc:9:1: error: no type named 'KernelTensor'")
    assert files(build.cache_folder()) == ["lock"]


def test_a_wheel_without_headers_is_named(compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "mindspore_folder", lambda: tmp_path / "mindspore")
    with pytest.raises(ClusterError, match=r"does not contain.*constraints\.txt"):
        build.ensure()


def test_a_cache_that_cannot_be_written_is_named(compiler, tmp_path, monkeypatch):
    compiler()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ClusterError, match=r"cannot be stored in .*set XDG_CACHE_HOME"):
        build.ensure()


def test_the_name_changes_with_sources_and_installation(tmp_path):
    package = build.mindspore_folder()
    before = build.key(package)
    assert build.key(package) == before != build.key(tmp_path)
    (tmp_path / "kernel.cc").write_text("")
    without = build.key(package, tmp_path)
    (tmp_path / "kernel.cc").write_text("// other")
    assert len({before, without, build.key(package, tmp_path)}) == 3


def test_the_name_of_another_plugins_library_changes_with_the_headers_that_it_shares(tmp_path, monkeypatch):
    sources, shim = tmp_path / "other_plugin" / "csrc", tmp_path / "shim"
    for folder in (sources, shim):
        folder.mkdir(parents=True)
        (folder / "pass.h").write_text("")
    monkeypatch.setattr(build, "SHIM", shim)
    before = build.key(build.mindspore_folder(), sources)
    (shim / "pass.h").write_text("// other")
    assert build.key(build.mindspore_folder(), sources) != before


def test_another_plugin_has_a_library_and_words_of_its_own(compiler, tmp_path, capsys):
    compiler()
    sources = tmp_path / "other_plugin" / "csrc"
    sources.mkdir(parents=True)
    (sources / "pass.cc").write_text("")
    path = build.ensure(sources, "do without it")
    assert path.parent.name == "other_plugin" and path != build.ensure()
    assert capsys.readouterr().err.startswith("other_plugin: compiling")
    (sources / "pass.cc").write_text("// other")
    compiler(code=1, words="pass.cc:1: error: no\n")
    with pytest.raises(ClusterError, match=r"library of other_plugin does not compile.*; do without it"):
        build.ensure(sources, "do without it")


@pytest.mark.parametrize("name", ["semi_auto_cpu", "grouped_gradient"])
def test_every_source_is_shipped_by_setup_cfg(name):
    import configparser

    config = configparser.ConfigParser()
    root = Path(build.__file__).resolve().parents[2]
    config.read(root / "setup.cfg")
    patterns = [text.strip() for text in config["options.package_data"][f"plugins.{name}"].split(",")]
    folder = root / "plugins" / name
    shipped = {path for pattern in patterns for path in folder.glob(pattern)}
    assert shipped == {path for path in (folder / "csrc").rglob("*") if path.is_file()}
