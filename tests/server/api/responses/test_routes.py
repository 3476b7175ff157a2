"""/v1/responses over HTTP, with the openai client and by hand."""

from __future__ import annotations


async def test_response_openai_client_receives_complete_answer(served):
    answer = await served.openai.responses.create(model="tiny", input="Hi")
    assert answer.output_text == "Hello wörld!"
    assert answer.status == "completed"
    assert answer.id.startswith("resp_")
