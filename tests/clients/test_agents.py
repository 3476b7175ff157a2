"""Coding agents, unchanged, started by `penstock launch`: each changes a file of its project.

The answers are scripted (tests/support/scripted_engine.py). The client, HTTP, the server and the
grammars of calls are real.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.clients.agents import Session, screen, session
from tests.support.scripted_serve import MODEL, call, custom_call

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not shutil.which("npm"), reason="needs node and npm"),
]

BEFORE = 'def greet(name):\n    return "Helo, " + name\n'
AFTER = 'def greet(name):\n    return "Hello, " + name\n'
CHECK = "python3 -c 'import greet; print(greet.greet(str(6 * 7)))' > said.txt"
SAID = "Hello, 42\n"
TASK = "Correct the spelling in greet.py."
ANSWER = "The greeting is spelled correctly now."


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of one file with a mistake."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "greet.py").write_text(BEFORE)
    return folder


def check(project: Path, done: Session, *left_in_home: str) -> None:
    """Check the file, the end of the session, and that nothing outside was used."""
    assert (project / "greet.py").read_text() == AFTER, str(done)
    assert (done.status, done.hosts) == (0, ()), str(done)
    assert done.left_in_home == set(left_in_home), str(done)


def check_whole_session(project: Path, done: Session) -> None:
    """Check a session that has also run a command and answered."""
    check(project, done)
    assert (project / "said.txt").read_text() == SAID, str(done)
    assert ANSWER in done.stdout, str(done)


def test_aider_with_a_diff_changes_the_file(project: Path) -> None:
    edit = """greet.py
```python
<<<<<<< SEARCH
    return "Helo, " + name
=======
    return "Hello, " + name
>>>>>>> REPLACE
```"""
    arguments = ["--no-git", "--yes-always", "--message", TASK, "greet.py"]
    done = session("aider", "aider", project.parent, arguments, ["It calls no tools."], [edit])
    check(project, done, ".aider")  # the id of an installation, and of the machine


def test_claude_code_edits_the_file_runs_it_and_answers(project: Path) -> None:
    file = str(project / "greet.py")
    turns = [
        "I read the file first.\n" + call("Read", file_path=file),
        call("Edit", file_path=file, old_string="Helo", new_string="Hello"),
        call("Bash", command=CHECK, description="Run the function"),
        ANSWER,
    ]
    arguments = ["-p", TASK, "--allowedTools", "Read,Edit,Bash"]
    done = session("claude", "claude", project.parent, arguments, turns)
    check_whole_session(project, done)


def test_opencode_edits_the_file_runs_it_and_answers(project: Path) -> None:
    file = str(project / "greet.py")
    turns = [
        "I read the file first.\n" + call("read", filePath=file),
        call("edit", filePath=file, oldString="Helo", newString="Hello"),
        call("bash", command=CHECK, description="Run the function"),
        ANSWER,
    ]
    title = ["Spelling"]
    done = session("opencode", "opencode", project.parent, ["run", TASK], turns, title)
    check_whole_session(project, done)


def test_qwen_code_edits_the_file_runs_it_and_answers(project: Path) -> None:
    file = str(project / "greet.py")
    turns = [
        "I read the file first.\n" + call("read_file", file_path=file),
        call("edit", file_path=file, old_string="Helo", new_string="Hello"),
        call("run_shell_command", command=CHECK, is_background=False),
        ANSWER,
    ]
    arguments = ["--approval-mode", "yolo", "-p", TASK]
    done = session("qwen-code", "qwen", project.parent, arguments, turns)
    check_whole_session(project, done)


def test_continue_edits_the_file_runs_it_and_answers(project: Path) -> None:
    file = str(project / "greet.py")
    turns = [
        "I read the file first.\n" + call("Read", filepath=file),
        call("Edit", file_path=file, old_string="Helo", new_string="Hello"),
        call("Bash", command=f"{CHECK}; env > environment.txt"),
        ANSWER,
    ]
    done = session("continue", "cn", project.parent, ["--auto", "-p", TASK], turns)
    check_whole_session(project, done)
    # Programs that it starts have the user's NODE_OPTIONS, without the hook of the launch.
    assert "no_other_host" not in (project / "environment.txt").read_text()


def test_codex_patches_the_file_runs_it_and_answers(project: Path) -> None:
    patch = """*** Begin Patch
*** Update File: greet.py
@@
 def greet(name):
-    return "Helo, " + name
+    return "Hello, " + name
*** End Patch
"""
    turns = [
        "I read the file first.\n" + call("exec_command", cmd="cat greet.py"),
        custom_call("apply_patch", patch),
        call("exec_command", cmd=CHECK),
        ANSWER,
    ]
    arguments = ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", TASK]
    done = session("codex", "codex", project.parent, arguments, turns)
    check_whole_session(project, done)
    assert "patch: completed" in done.stderr, str(done)


DOWN, ENTER = "\x1b[B", "\r"


@pytest.mark.parametrize(
    ("client", "command", "keys"),
    [
        ("aider", "aider", ["n", ENTER]),  # it offers to make a repository
        ("claude", "claude", [DOWN, ENTER]),  # it trusts no folder without a question
        ("codex", "codex", [ENTER]),
        ("continue", "cn", []),
        ("opencode", "opencode", ["", ""]),  # it needs longer
        ("qwen-code", "qwen", []),
    ],
)
def test_screen_of_a_client_shows_the_model_and_contacts_no_other_host(
    client: str, command: str, keys: list[str], project: Path
) -> None:
    shown = screen(client, command, project.parent, keys)
    assert shown.hosts == (), shown.text
    own = re.split(r"\n  (?:set|with)  [^\n]*\n", shown.text)[-1]  # without the summary
    assert MODEL.rpartition("/")[2] in own, own
