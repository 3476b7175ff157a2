"""GET /capabilities, /tokenizer_info and the facts of /v1/models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tests.server.conftest import BOS, EOS, TEMPLATE
from tests.support.fake_engine import INFO, FakeEngine, Script
from tests.support.rig import Served, serving

CHAT = "/v1/chat/completions"


async def capabilities(served: Served) -> dict[str, Any]:
    body: dict[str, Any] = (await served.http.get("/capabilities")).json()
    body["routes"] = {route["path"]: route for route in body["routes"]}
    return body


async def test_capabilities_lists_every_route_and_limit(served: Served) -> None:
    body = await capabilities(served)
    document = (await served.http.get("/openapi.json")).json()
    assert set(body["routes"]) == set(document["paths"])
    assert body["model"]["id"] == "tiny"
    assert body["limits"]["max_model_len"] == 512
    assert body["limits"]["max_num_seqs"] == INFO.max_num_seqs
    assert "json_schema" in body["structured_output"]
    assert body["reasoning"] == {"supported": False, "format": None}
    assert "parameters" not in body["routes"]["/health"]


async def test_capabilities_of_a_path_are_those_of_its_routes(served: Served) -> None:
    whole = (await served.http.get("/capabilities")).json()
    part = (await served.http.get("/capabilities", params={"path": CHAT})).json()
    assert part == {**whole, "routes": [r for r in whole["routes"] if r["path"] == CHAT]}
    assert len(part["routes"]) == 1
    unknown = (await served.http.get("/capabilities", params={"path": "/v2"})).json()
    assert unknown["routes"] == []


async def test_capabilities_say_whether_logits_depend_on_the_batch(served: Served) -> None:
    assert (await capabilities(served))["batch_invariant"] is True
    served.engine.info = replace(INFO, batch_variance="amx")
    assert (await capabilities(served))["batch_invariant"] is False


async def test_capabilities_parameters_have_ranges_and_defaults_of_checkpoint(
    served: Served,
) -> None:
    routes = (await capabilities(served))["routes"]
    parameters = routes[CHAT]["parameters"]
    temperature = parameters["temperature"]
    assert (temperature["type"], temperature["minimum"], temperature["maximum"]) == ("number", 0, 2)
    assert temperature["default"] == 0.6, "that of generation_config.json"
    assert parameters["top_k"]["default"] == 20
    assert (parameters["n"]["minimum"], parameters["n"]["maximum"]) == (1, 128)
    assert routes[CHAT]["required"] == ["messages"]
    assert routes[CHAT]["streams"]
    assert "default" not in routes["/tokenize"]["parameters"]["prompt"]


async def test_capabilities_range_is_what_the_route_accepts(served: Served) -> None:
    parameters = (await capabilities(served))["routes"][CHAT]["parameters"]
    tried = 0
    del parameters["min_tokens"]  # at most max_tokens
    for name, schema in parameters.items():
        for bound, beyond in (("minimum", -1), ("maximum", 1)):
            if bound not in schema:
                continue
            tried += 1
            fields = {"logprobs": True, "max_tokens": 1, name: schema[bound]}
            assert (await served.chat(**fields)).status_code == 200, fields
            fields[name] += beyond
            assert (await served.chat(**fields)).status_code == 400, fields
    assert tried > 20


async def test_capabilities_of_an_encoder_lists_generation_as_unavailable(
    model: Path, says: Callable[[str], Script]
) -> None:
    info = replace(INFO, kind="encoder", embedding_size=8)
    async with serving(FakeEngine(says("x"), info=info), model) as served:
        body = await capabilities(served)
        routes = body["routes"]
        assert not routes[CHAT]["available"]
        assert routes["/v1/embeddings"]["available"]
        assert routes["/tokenize"]["available"]
        assert body["structured_output"] == []
        assert not body["tool_calling"]["supported"]
        assert body["model"]["capabilities"] == ["embedding"]
        assert (body["model"]["task"], body["model"]["embedding_size"]) == ("embed", 8)


HERMES = """\
{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}<{{ m.role }}>
{%- if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


async def test_capabilities_names_the_formats_that_the_template_renders(
    model: Path, tmp_path: Path, says: Callable[[str], Script]
) -> None:
    file = tmp_path / "hermes.jinja"
    file.write_text(HERMES)
    async with serving(FakeEngine(says("x")), model, chat_template=str(file)) as served:
        body = await capabilities(served)
    assert body["tool_calling"] == {
        "supported": True,
        "format": "hermes",
        "source": "table",
        "round_trips": True,
        "shown_by": "template",
    }
    assert body["reasoning"] == {"supported": True, "format": "think"}
    assert body["model"]["capabilities"] == ["completion", "chat", "tools", "thinking"]


async def test_capabilities_of_a_template_without_tools_name_the_system_message(
    served: Served,
) -> None:
    found = (await capabilities(served))["tool_calling"]
    assert (found["format"], found["shown_by"], found["round_trips"]) == (
        "hermes",
        "system_message",
        False,
    )


async def test_capabilities_of_a_model_without_template_have_no_tools(served: Served) -> None:
    state = served.app.state.penstock
    served.app.state.penstock = dataclasses.replace(state, template=None, answers=None, hermes=None)
    body = await capabilities(served)
    assert body["tool_calling"] == body["reasoning"] == {"supported": False, "format": None}
    assert body["model"]["capabilities"] == ["completion"]


async def test_models_have_the_facts_that_routers_read(served: Served) -> None:
    body = (await served.http.get("/v1/models/tiny")).json()
    assert (body["architecture"], body["dtype"], body["device"]) == ("Fake", "float32", "cpu")
    assert (body["parameters"], body["quantization"]) == (1, None)
    assert body["kv_cache_dtype"] is body["speculative_model"] is None
    assert body["tensor_parallel_size"] == 1
    assert body["capabilities"] == ["completion", "chat"]
    assert body["meta"] == {"n_vocab": 258, "n_ctx": 512, "n_params": 1, "size": 4}
    assert (await served.http.get("/v1/models")).json()["data"] == [body]


async def test_facts_while_model_loads_return_503(
    model: Path, says: Callable[[str], Script]
) -> None:
    async with serving(FakeEngine(says("x"), state="loading", info=None), model) as served:
        for path in ("/capabilities", "/tokenizer_info"):
            assert (await served.http.get(path)).status_code == 503


async def test_tokenizer_info_has_special_tokens_and_template(served: Served) -> None:
    body = (await served.http.get("/tokenizer_info")).json()
    assert (body["vocab_size"], body["model_max_length"]) == (258, 512)
    assert (body["bos_token"], body["bos_token_id"]) == ("<s>", BOS)
    assert (body["eos_token"], body["eos_token_ids"]) == ("</s>", [EOS])
    assert body["special_tokens"] == {str(BOS): "<s>", str(EOS): "</s>"}
    assert body["chat_template"] == TEMPLATE
    assert body["tokenizer_class"] is None
