"""Flags of other servers are answered with Penstock's."""

from __future__ import annotations

import pytest

from server.cli.foreign_flags import INSTEAD, SAME, all_advice
from server.settings import settings
from tests.support.command_line import penstock

FLAGS = {setting.flag for setting in settings()} | {
    f"--no-{setting.flag[2:]}" for setting in settings() if setting.is_switch
}


def test_flags_of_other_servers_lead_to_flags_that_exist():
    for flags in SAME.values():
        for theirs, ours in flags.items():
            assert ours.split()[0] in FLAGS, theirs
            assert theirs not in FLAGS, f"{theirs} is a flag of Penstock's, too"
    for reasons in INSTEAD.values():
        assert not reasons.keys() & FLAGS


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-c", "4096"], "-c is a flag of llama.cpp; Penstock's is --max-model-len."),
        (["--ctx-size=4096"], "--ctx-size is a flag of llama.cpp; Penstock's is --max-model-len."),
        (["--max_model_len", "9"], "--max_model_len is written --max-model-len."),
        (["--trust_remote_code"], "--trust_remote_code is a flag of vLLM: code of a checkpoint"),
        (["--enable-request-id-headers"], "flag of vLLM: every answer has x-request-id."),
        (["--enable_prompt_tokens_details"], "usage has prompt_tokens_details without it."),
        (["--enable-server-load-tracking"], "flag of vLLM: /load is always served."),
        (["--enable-tokenizer-info-endpoint"], "/tokenizer_info is always served."),
        (["--middleware=a.b"], "flag of vLLM: the server imports no code of others"),
        (["--kv-transfer-config", "{}"], "flag of vLLM: prompts and answers are computed by one"),
        (["--context-length", "9"], "a flag of SGLang; Penstock's is --max-model-len."),
        (["--host", "::1", "-ngl", "99"], "-ngl is a flag of llama.cpp: all layers are on the GPU"),
        (
            ["--mmproj", "a"],
            "flag of llama.cpp: put the mmproj file into the folder of the mod",
        ),
        (["--limit-mm-per-prompt", "{}"], "flag of vLLM: a request may have 100 images; see docs/"),
        (["--allowed-media-domains", "a"], "flag of vLLM; Penstock's is --image-hosts."),
        (["--", "-c"], ""),
        (["--unknown"], ""),
        (["--host", "0.0.0.0"], ""),
    ],
)
def test_all_advice_names_our_flag(arguments, text):
    found = all_advice(arguments, FLAGS)
    assert text in found
    assert bool(found) == bool(text)


def test_all_advice_has_a_line_for_each_foreign_flag_and_each_only_once():
    given = ["-c", "4096", "--host", "::1", "-ngl=99", "--enable-auto-tool-choice", "-c", "1"]
    lines = all_advice([*given, "--max_model_len", "--", "--jinja"], FLAGS).splitlines()
    named = ["-c", "-ngl", "--enable-auto-tool-choice", "--max_model_len"]
    assert [line.partition(" ")[0] for line in lines] == named


def test_command_with_a_foreign_flag_exits_with_2():
    answer = penstock("serve", "demo", "-c", "4096", "--tp", "2")
    assert answer.returncode == 2
    assert "Penstock's is --max-model-len." in answer.stderr
    assert "Penstock's is --tensor-parallel-size." in answer.stderr
