"""OpenAI's Responses API: /v1/responses, with the store that `previous_response_id` reads."""
