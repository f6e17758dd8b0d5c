"""The command line: what is printed, exit codes, one-line errors, and what is not imported."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import tarfile
import termios
from pathlib import Path

import pytest
from typer._completion_shared import get_completion_script

from dsecfs.cli.main import COMMANDS
from tests.support.cli import Dsec
from tests.support.seaweed import Seaweed
from tests.t3_layers.oci import layer_tar, oci_layout


@pytest.fixture
def dsec(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Dsec:
    return Dsec(tmp_path, capfd, monkeypatch)


@pytest.fixture
def base(dsec: Dsec, tmp_path: Path) -> str:
    """A published base."""
    top = tmp_path / "rootfs"
    for name, text in {
        "etc/passwd": "root:x:0:0::/root:/bin/sh\n",
        "bin/tool": "#!/bin/sh\n",
        "usr/share/doc": "read me",
    }.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)
    dsec("layer", "publish", str(top), "base/debian:12")
    return "debian:12"


@pytest.fixture
def toolkit(dsec: Dsec, tmp_path: Path) -> str:
    """A published toolkit, put at /opt/dsh."""
    top = tmp_path / "dsh"
    (top / "bin").mkdir(parents=True)
    (top / "bin/dsh").write_text("#!/bin/sh\necho dsh\n")
    dsec(
        *("layer", "publish", str(top), "toolkit/dsh:1.5", "--at", "/opt/dsh"),
        *("--path-prepend", "/opt/dsh/bin", "--label", "git=abc"),
    )
    return "dsh:1.5"


def child(dsec: Dsec, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [sys.executable, "-m", "dsecfs.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **dsec.environ, "PYTHONPATH": os.getcwd(), "COLUMNS": "80"},
        **options,  # type: ignore[call-overload]
    )
    return done


# -- layers


def test_publish_show_and_list(dsec: Dsec, base: str, toolkit: str) -> None:
    shown = dsec("layer", "show", toolkit).json
    assert shown["kind"] == "toolkit" and shown["labels"] == {"git": "abc"}
    assert shown["prepends"] == {"PATH": "/opt/dsh/bin"}
    names = [row["name"] for row in dsec("layer", "ls").json]
    assert names == ["base/debian:12", "toolkit/dsh:1.5"]
    assert [row["name"] for row in dsec("layer", "ls", "toolkit/d").json] == ["toolkit/dsh:1.5"]
    long = dsec("layer", "ls", "-l", "--kind", "base").json[0]
    assert long["digest"] == dsec("layer", "show", base).json["digest"]
    assert long["bytes"] == len("root:x:0:0::/root:/bin/sh\n#!/bin/sh\nread me")


def test_tables_for_people_have_no_json(dsec: Dsec, toolkit: str) -> None:
    text = dsec("layer", "ls", "--no-json").out
    assert text.splitlines()[0].split() == ["name", "digest", "created"]
    assert "toolkit/dsh:1.5" in text and "{" not in text
    assert "git=abc" in dsec("--no-json", "layer", "show", toolkit).out


def test_publishing_again_uploads_nothing_and_other_content_is_a_conflict(
    dsec: Dsec, toolkit: str, tmp_path: Path
) -> None:
    again = dsec(
        *("layer", "publish", str(tmp_path / "dsh"), "toolkit/dsh:1.5", "--at", "/opt/dsh"),
        *("--path-prepend", "/opt/dsh/bin", "--label", "git=abc"),
    ).json
    assert again["uploaded"] == 0
    (tmp_path / "dsh/more").write_text("more")
    said = dsec(
        "layer", "publish", str(tmp_path / "dsh"), "toolkit/dsh:1.5", "--at", "/opt/dsh", code=4
    )
    assert "toolkit/dsh:1.5 exists already" in said.error and "another version" in said.error


def test_a_layer_needs_its_kind_and_a_source_that_exists(dsec: Dsec, tmp_path: Path) -> None:
    said = dsec("layer", "publish", str(tmp_path), "dsh:1.5", code=2)
    assert "does not say what kind" in said.error and "KIND/NAME:VERSION" in said.error
    said = dsec("layer", "publish", str(tmp_path / "none"), "base/x:1", code=3)
    assert "no such file or directory" in said.error


def test_a_published_archive_exports_to_the_same_files(
    dsec: Dsec, base: str, tmp_path: Path
) -> None:
    archive = tmp_path / "base.tar"
    exported = dsec("layer", "export", base, str(archive)).json
    with tarfile.open(archive) as tar:
        assert len(tar.getnames()) == exported["entries"]
    dsec("layer", "publish", str(archive), "base/again:1")
    assert dsec("layer", "diff", base, "again:1", "--times").json == []
    assert not list(tmp_path.glob("*.part"))


def test_an_export_has_overlay_marks_as_they_were(dsec: Dsec, tmp_path: Path) -> None:
    nested = tmp_path / "nested"
    nested.mkdir()
    os.setxattr(nested, "user.overlay.origin", b"x")
    dsec("layer", "publish", str(nested), "base/nested:1")
    archive = tmp_path / "nested.tar"
    dsec("layer", "export", "base/nested:1", str(archive))
    with tarfile.open(archive) as tar:
        assert tar.getmember(".").pax_headers["SCHILY.xattr.user.overlay.origin"] == "x"
    dsec("layer", "publish", str(archive), "base/nested:2")
    assert dsec("layer", "diff", "nested:1", "nested:2").json == []


def test_diff_says_what_changed(dsec: Dsec, base: str, tmp_path: Path) -> None:
    (tmp_path / "rootfs/etc/passwd").write_text("root:x:0:0::/root:/bin/zh\n")
    (tmp_path / "rootfs/bin/tool").chmod(0o4755)
    (tmp_path / "rootfs/new").touch()
    (tmp_path / "rootfs/usr/share/doc").unlink()
    dsec("layer", "publish", str(tmp_path / "rootfs"), "base/debian:13")
    changes = dsec("layer", "diff", base, "debian:13", code=1).json
    assert {(c["path"], c["change"], *c["aspects"]) for c in changes} == {
        ("/etc/passwd", "changed", "content"),
        ("/bin/tool", "changed", "mode"),
        ("/new", "added"),
        ("/usr/share/doc", "removed"),
    }


def test_verify_finds_damage(dsec: Dsec, base: str, tmp_path: Path) -> None:
    assert dsec("layer", "verify", base).json["bad_chunks"] == 0
    (found,) = (p for p in (tmp_path / "store/objects").rglob("*") if p.is_file())
    found.chmod(0o644)
    data = bytearray(found.read_bytes())
    data[5] ^= 1
    found.write_bytes(data)
    said = dsec("layer", "verify", base, code=1)
    assert said.json["bad_chunks"] == 1
    assert "publish the same content again" in said.error
    assert dsec("store", "check", "--data", code=1).json["damage"]


def test_remove_trash_and_restore(dsec: Dsec, toolkit: str) -> None:
    assert dsec("layer", "rm", toolkit).json[0]["name"] == "toolkit/dsh:1.5"
    dsec("layer", "show", toolkit, code=3)
    assert dsec("store", "trash").json[0]["name"] == "toolkit/dsh:1.5"
    dsec("store", "restore", toolkit)
    dsec("layer", "show", toolkit)
    assert dsec("store", "trash").json == []


def test_used_by_names_environments(dsec: Dsec, base: str, toolkit: str) -> None:
    dsec("env", "create", "team/app:1", base, f"+{toolkit}")
    uses = dsec("layer", "used-by", toolkit).json
    assert {u["what"] for u in uses} == {"ref", "env"}
    assert [u["names"] for u in uses if u["what"] == "env"] == [["team/app:1"]]
    (digest,) = (u["name"] for u in uses if u["what"] == "env")
    assert f"sha256:{digest[:12]} " in dsec("layer", "used-by", toolkit, "--no-json").out


# -- environments and channels


def test_an_environment_is_composed_and_shown(dsec: Dsec, base: str, toolkit: str) -> None:
    dsec(
        *("env", "create", "team/app:1", base, f"+{toolkit}", "-e", "A=1", "-w", "/srv"),
        *("--cmd", "tool --fast 'two words'"),
    )
    shown = dsec("env", "show", "team/app:1").json
    assert [row["layer"] for row in shown["layers"]] == ["base", "toolkit dsh"]
    assert shown["cmd"] == ["tool", "--fast", "two words"] and shown["cwd"] == "/srv"
    assert shown["env"]["A"] == "1" and shown["env"]["PATH"].startswith("/opt/dsh/bin:")
    assert [row["name"] for row in dsec("env", "ls").json] == ["team/app:1"]
    dsec("env", "rm", "team/app:1")
    assert dsec("env", "ls").json == []


def test_a_name_that_almost_exists_is_suggested(dsec: Dsec, base: str) -> None:
    dsec("env", "create", "swe/django:1", base)
    said = dsec("env", "show", "swe/djagno:1", code=3)
    assert said.error == "no environment swe/djagno:1; did you mean swe/django:1?"


def test_channels_move_and_keep_a_log(dsec: Dsec, base: str, toolkit: str) -> None:
    dsec("channel", "set", "dsh@stable", "1.5", "--reason", "it works")
    assert dsec("channel", "get", "dsh@stable").json["version"] == "1.5"
    assert dsec("channel", "ls").json[0]["channel"] == "toolkit/dsh@stable"
    dsec("channel", "close", "dsh@stable", "--reason", "no more")
    log = dsec("channel", "log", "toolkit/dsh@stable").json
    assert [e["version"] for e in log] == ["1.5", "closed"]
    assert [e["reason"] for e in log] == ["it works", "no more"]
    assert "was closed: no more" in dsec("env", "show", base, "+dsh@stable", code=3).error
    dsec("channel", "set", "dsh@beta", "1.5")
    dsec("channel", "close", "dsh@beta")
    assert "dsh@beta was closed; dsec" in dsec("env", "show", base, "+dsh@beta", code=3).error


def test_check_and_explain(dsec: Dsec, base: str, tmp_path: Path) -> None:
    top = tmp_path / "bad"
    (top / "etc").mkdir(parents=True)
    (top / "etc/passwd").write_text("other:x:1:1::/:/bin/sh\n")
    (top / "etc/hosts").write_text("127.0.0.1 localhost\n")
    dsec("layer", "publish", str(top), "toolkit/bad:1")
    (found,) = dsec("env", "check", base, "+bad:1", code=1).json
    assert (found["path"], found["risk"], found["of"], found["by"]) == (
        *("/etc/passwd", "high", "base", "toolkit bad"),
    )
    stands = dsec("env", "explain", base, "+bad:1", "etc/passwd").json
    assert [(s["layer"], s["provides"]) for s in stands] == [("toolkit bad", True), ("base", False)]
    said = dsec("env", "explain", base, "/no/such", code=3)
    assert "no layer has /no/such" in said.error
    dsec("env", "check", base)


# -- images


def test_one_image(dsec: Dsec, tmp_path: Path) -> None:
    oci_layout(tmp_path / "image", [layer_tar([("a", b"hello")])], {"Env": ["X=1"]})
    done = dsec("image", "import", f"oci:{tmp_path}/image", "swe/django:1").json
    assert done["layers"] == 1 and done["files"] == 2
    assert dsec("env", "show", "swe/django:1").json["env"]["X"] == "1"


def test_a_tree_is_no_image(dsec: Dsec, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    for spec in (f"dir:{tmp_path}/tree", str(tmp_path / "tree")):
        assert "dsec layer publish" in dsec("image", "import", spec, "a:1", code=2).error
    assert dsec("layer", "ls").json == []


def test_many_images_with_a_report_that_is_resumed(dsec: Dsec, tmp_path: Path) -> None:
    shared = layer_tar([("shared", b"shared" * 1000)])
    for i in range(3):
        oci_layout(tmp_path / f"image{i}", [shared, layer_tar([("own", b"%d" % i)])], {})
    images = tmp_path / "images.txt"
    lines = [f"oci:{tmp_path}/image{i} many/i:{i}" for i in range(3)]
    images.write_text("\n".join(["# images", "", *lines, f"oci:{tmp_path}/none many/none:1"]))
    report = tmp_path / "out.jsonl"
    words = ("image", "import", "--from", str(images), "--jobs", "2", "--report", str(report))
    said = dsec(*words, code=1)
    assert "1 of 4 images were not imported" in said.error
    assert sorted(row["outcome"] for row in said.json) == ["failed", *["imported"] * 3]
    # A line that a crash cut off does not count, and neither does a name that is gone.
    report.write_text(report.read_text() + '{"spec": "oci:x", "na')
    dsec("env", "rm", "many/i:0")
    oci_layout(tmp_path / "none", [layer_tar([("late", b"1")])], {})
    again = dsec(*words, "--resume").json
    assert {row["name"]: row["outcome"] for row in again} == {
        "many/i:0": "imported",
        "many/i:1": "skipped",
        "many/i:2": "skipped",
        "many/none:1": "imported",
    }
    assert {row["outcome"] for row in dsec(*words, "--resume").json} == {"skipped"}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("oci:x", "images.txt:1: 1 words"),
        ("oci:x a:1\noci:y a:1", "images.txt:2: a:1 stands in line 1"),
        ("oci:x A:1", "images.txt:1: not a name"),
    ],
)
def test_a_bad_list_is_refused_before_anything_is_done(
    dsec: Dsec, tmp_path: Path, text: str, error: str
) -> None:
    (tmp_path / "images.txt").write_text(text)
    assert error in dsec("image", "import", "--from", str(tmp_path / "images.txt"), code=2).error


# -- store, cache, settings


def test_collection_is_harmless_and_explains(dsec: Dsec, base: str) -> None:
    rows = {row["what"]: row["objects"] for row in dsec("store", "gc", "--dry-run").json}
    assert rows["deleted"] == rows["missing"] == 0 and rows["kept"] == 3
    assert all(row["why"] for row in dsec("store", "gc", "--explain").json)
    assert {row["kind"] for row in dsec("store", "stats").json} >= {"heads", "objects", "refs"}


def test_a_store_that_is_not_there(dsec: Dsec, tmp_path: Path) -> None:
    said = dsec("layer", "ls", "--store", f"file:{tmp_path}/none", code=3)
    assert str(tmp_path / "none") in said.error
    assert dsec("store", "init", "--store", f"3fs:{tmp_path}/none").json["usable"]
    assert dsec("layer", "ls", "--store", f"3fs:{tmp_path}/none").json == []


def test_doctor_names_a_store_that_is_not_there(dsec: Dsec, tmp_path: Path) -> None:
    said = dsec("doctor", "--store", f"file:{tmp_path}/none", code=8)
    (found,) = (f for f in said.json["findings"] if f["area"] == "store")
    assert found["state"] == "missing" and found["needed"] and "store init" in found["hint"]


def test_settings_and_their_origins(dsec: Dsec) -> None:
    rows = {row["name"]: row for row in dsec("--set", "fetch_threads=4", "config", "show").json}
    assert (rows["fetch_threads"]["value"], rows["fetch_threads"]["origin"]) == (4, "command line")
    assert rows["store"]["origin"] == "$DSEC_STORE"
    said = dsec("config", "show", "--set", "fetch_treads=4", code=2)
    assert said.error.endswith("'fetch_treads' (command line); did you mean fetch_threads?")
    assert dsec("cache", "stats").json["disk"] == 0
    assert dsec("config", "show", "check_rate", "--no-json").out.split()[-1] == "16MiB"


# -- the command line itself


def test_errors_as_json(dsec: Dsec) -> None:
    said = dsec("--json", "env", "show", "none:1", code=3)
    error = json.loads(said.err)["error"]
    assert error["type"] == "NotFound" and error["message"] == "no environment none:1"
    assert error["exit_code"] == 3 and error["hint"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("lyer", "ls"), "Did you mean 'layer'?"),
        (("layer", "lss"), "Did you mean 'ls'?"),
        (("layer", "show"), "dsec layer show --help"),
        (("layer", "ls", "--nope"), "No such option"),
        (("image", "import", "--jobs", "many"), "--jobs"),
        (("layer", "ls", "--set", "novalue"), "NAME=VALUE"),
    ],
)
def test_a_command_line_that_makes_no_sense(dsec: Dsec, words: tuple[str, ...], part: str) -> None:
    assert part in dsec(*words, code=2).error


def test_a_plain_archive_is_no_image(dsec: Dsec, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    said = dsec("image", "import", f"dir:{tmp_path}/tree", "swe/x:1", code=2).error
    assert "dsec layer publish" in said
    words = ("layer", "publish", str(tmp_path / "tree"), "toolkit/x:1")
    assert "lz4, zstd" in dsec(*words, "--codec", "lz5", code=2).error


def test_common_options_may_stand_anywhere(dsec: Dsec, toolkit: str) -> None:
    for words in (["--no-json", "layer", "ls"], ["layer", "--no-json", "ls"]):
        assert dsec(*words).out == dsec("layer", "ls", "--no-json").out


def test_debug_shows_where_an_error_came_from(dsec: Dsec) -> None:
    plain = child(dsec, "layer", "show", "none:1")
    assert plain.returncode == 3 and "Traceback" not in plain.stderr
    debug = child(dsec, "layer", "show", "none:1", "--debug")
    assert debug.returncode != 0 and "Traceback" in debug.stderr and "NotFound" in debug.stderr


def test_help_lists_every_command_and_imports_none(dsec: Dsec) -> None:
    script = (
        "import sys; sys.argv = ['dsec', '--help']\n"
        "from dsecfs.cli.main import run; code = run(['--help'])\n"
        "print([m for m in sys.modules if m.startswith('dsecfs.cli.')], file=sys.stderr)\n"
        "print([m for m in sys.modules if m in ('boto3', 'trio', 'pyfuse3', 'pydantic')],"
        " file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    for name, entry in COMMANDS.items():
        assert f" {name} " in done.stdout and entry.help.split(".")[0][:30] in done.stdout
    modules, heavy = done.stderr.splitlines()
    assert heavy == "[]"
    assert set(json.loads(modules.replace("'", "\""))) == {
        f"dsecfs.cli.{m}" for m in ("lazy", "main", "session")
    }


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_explains_itself(dsec: Dsec, name: str) -> None:
    assert name in dsec(name, "--help").out


def test_what_reading_commands_do_not_import(dsec: Dsec, base: str) -> None:
    script = (
        "import sys\n"
        "from dsecfs.cli.main import run\n"
        f"code = run(['layer', 'show', {base!r}])\n"
        "heavy = {'boto3', 'obstore', 'trio', 'pyfuse3', 'pydantic', 'rich'} & set(sys.modules)\n"
        "print(code, sorted(heavy), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **dsec.environ},
    )
    assert done.stderr == "0 []\n"


def test_completion_of_commands_options_and_names(dsec: Dsec, base: str, toolkit: str) -> None:
    def complete(line: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "dsecfs.cli.main"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={
                **os.environ,
                **dsec.environ,
                "_DSEC_COMPLETE": "complete_bash",
                "COMP_WORDS": line,
                "COMP_CWORD": str(len(line.split(" ")) - 1),
            },
        )
        return done.stdout

    assert "layer" in complete("dsec la").split()
    assert "used-by" in complete("dsec layer us").split()
    assert "--label" in complete("dsec layer publish --la").split()
    assert "base/debian:12" in complete("dsec layer show base/d").split()
    assert complete("dsec run deb").split() == ["debian:12"], "the kind may be left out"
    dsec("channel", "set", "dsh@stable", toolkit)
    assert complete("dsec run debian:12 +d").split() == ["+dsh:1.5", "+dsh@stable"]
    assert complete("dsec run debian:12 d").split() == []
    assert complete("dsec channel get ").split() == ["toolkit/dsh@stable"]
    assert complete("dsec --set fetch_t").split() == ["fetch_threads="]
    dsec("layer", "rm", toolkit)
    assert complete("dsec store restore t").split() == ["toolkit/dsh:1.5"]


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        (["run", "debian", ":", ""], ""),
        (["run", "debian", ":", "1"], "12"),
        (["run", "debian", ":"], "12"),
        (["run", "debian", ":", "12", "+dsh", "@", "s"], "stable"),
        (["run", "debian", ":", "12", "+d"], "+dsh@stable"),
        (["layer", "show", "toolkit/dsh", ":"], "1.5"),
    ],
)
def test_bash_takes_names_apart(
    dsec: Dsec, base: str, toolkit: str, tmp_path: Path, typed: list[str], answer: str
) -> None:
    """As its own function calls us: words are split at what names hold, too."""
    dsec("channel", "set", "dsh@stable", "toolkit/dsh:1.5")
    program = tmp_path / "dsec"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m dsecfs.cli.main "$@"\n')
    program.chmod(0o755)
    script = """
        COMP_WORDS=("$0" "$@"); COMP_CWORD=$#
        _dsec_completion "$0"
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    source = get_completion_script(prog_name="dsec", complete_var="_DSEC_COMPLETE", shell="bash")
    script = source + script
    done = subprocess.run(
        ["bash", "-c", script, str(program), *typed],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **dsec.environ, "PYTHONPATH": os.getcwd()},
    )
    assert answer in done.stdout.split("\n"), done


def test_a_reader_that_has_seen_enough_is_no_error(dsec: Dsec, base: str) -> None:
    done = subprocess.run(
        f"{sys.executable} -m dsecfs.cli.main layer export {base} - | head -c 10 | wc -c",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **dsec.environ},
    )
    assert done.stdout.strip() == "10" and "Traceback" not in done.stderr


def test_on_a_terminal_there_are_tables_with_whole_names(dsec: Dsec, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    name = "toolkit/a/name/that/leaves/little/of/eighty/columns:2026-01-01"
    dsec("layer", "publish", str(tmp_path / "tree"), name)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dsecfs.cli.main", "layer", "ls", "-l"],
            stdout=theirs,
            stderr=subprocess.PIPE,
            timeout=60,
            check=True,
            env={**os.environ, **dsec.environ, "TERM": "dumb"},
        )
        assert done.stderr == b""
        text = os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert name in text and "{" not in text


def test_the_same_commands_against_s3(
    dsec: Dsec, base: str, s3_server: Seaweed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    digest = dsec("layer", "show", base).json["digest"]
    url, _, options = s3_server.url(prefix=f"cli/{tmp_path.name}").partition("?")
    monkeypatch.setenv("DSEC_STORE", url)
    monkeypatch.setenv("DSEC_S3_ENDPOINT", s3_server.endpoint)
    monkeypatch.setenv("DSEC_S3_PATH_STYLE", "true")
    assert dsec("store", "init").json["usable"], options
    assert dsec("layer", "ls").json == []
    dsec("layer", "publish", str(tmp_path / "rootfs"), "base/debian:12")
    assert dsec("layer", "show", base).json["digest"] == digest
    assert dsec("layer", "verify", base).json["bad_chunks"] == 0
    dsec("layer", "export", base, str(tmp_path / "out.tar"))
    dsec("layer", "rm", base)
    assert dsec("store", "trash").json[0]["name"] == "base/debian:12"
