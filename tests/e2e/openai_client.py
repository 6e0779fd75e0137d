"""What the official `openai` client sees of a fleet: run with the fleet's address, prints one line per check.

    python tests/e2e/openai_client.py http://127.0.0.1:8080
"""

import asyncio
import concurrent.futures
import http.client
import json
import sys
import traceback
import urllib.parse

import openai

BASE = sys.argv[1].rstrip("/")
CLIENT = openai.OpenAI(base_url=BASE + "/v1", api_key="unused", max_retries=0, timeout=300)
MODEL = CLIENT.models.list().data[0].id
QUESTION = [{"role": "user", "content": "What is the capital of France? One short sentence."}]

CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def chat(messages=None, **options):
    options = {"model": MODEL, "temperature": 0, "max_tokens": 16, **options}
    return CLIENT.chat.completions.create(messages=messages or QUESTION, **options)


def complete(prompt="The capital of France is", **options):
    options = {"model": MODEL, "temperature": 0, "max_tokens": 8, **options}
    return CLIENT.completions.create(prompt=prompt, **options)


def text_of(stream):
    return "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)


def raw(method, path, body=None, headers=None):
    """Status and JSON of a request that the client would not send."""
    address = urllib.parse.urlparse(BASE)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=300)
    try:
        connection.request(method, path, body, {"content-type": "application/json", **(headers or {})})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def refused(kind, call, *parts):
    """The call must fail with this error class, and its message must have each part."""
    try:
        call()
    except kind as error:
        body = error.body if isinstance(error.body, dict) else {}
        message = str(body.get("message", error))
        for part in parts:
            assert part in message, f"{part!r} is not in {message!r}"
        assert body.get("code") == error.status_code, body
        return error
    raise AssertionError(f"no {kind.__name__}")


@check
def models_are_listed_with_their_context():
    model = CLIENT.models.list().data[0]
    assert model.object == "model" and model.owned_by
    assert model.max_model_len > 1000, model


@check
def a_chat_is_answered_sensibly():
    answer = chat().choices[0]
    assert "Paris" in answer.message.content, answer
    assert answer.message.role == "assistant" and answer.finish_reason == "stop"


@check
def usage_adds_up():
    usage = chat().usage
    assert usage.prompt_tokens > 10 and usage.completion_tokens > 3
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@check
def a_stream_says_what_the_whole_answer_says():
    assert text_of(chat(stream=True)) == chat().choices[0].message.content


@check
def a_stream_begins_with_its_role_and_ends_with_its_reason():
    chunks = list(chat(stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].object == "chat.completion.chunk"


@check
def tokens_come_one_by_one():
    pieces = [chunk for chunk in chat(stream=True) if chunk.choices and chunk.choices[0].delta.content]
    assert len(pieces) >= 4, len(pieces)


@check
def stream_usage_comes_when_asked_for():
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == chat().usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert all(chunk.usage is None for chunk in chat(stream=True))


@check
def continuous_usage_counts_up():
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk.usage.completion_tokens for chunk in chat(stream=True, stream_options=options)]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] > 3, counts


@check
def max_tokens_cuts_the_answer():
    answer = chat(max_tokens=3)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 3
    answer = chat(max_tokens=openai.NOT_GIVEN, max_completion_tokens=2)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 2


@check
def a_stop_string_ends_the_answer_and_is_left_out():
    whole = chat().choices[0].message.content
    answer = chat(stop=[" France"]).choices[0]
    assert answer.finish_reason == "stop" and answer.message.content == whole.split(" France")[0], answer
    assert text_of(chat(stop=" France", stream=True)) == whole.split(" France")[0]


@check
def a_stop_string_across_tokens_ends_the_answer():
    whole = chat().choices[0].message.content
    stop = whole[2:9]
    assert chat(stop=stop).choices[0].message.content == whole.split(stop)[0]


@check
def a_seed_makes_sampling_reproducible():
    def sample(seed):
        return chat(temperature=1.2, seed=seed, max_tokens=24).choices[0].message.content

    assert sample(7) == sample(7)
    assert len({sample(seed) for seed in range(4)}) > 1


@check
def n_gives_distinct_choices_in_order():
    answer = chat(n=3, temperature=1.5, seed=5, max_tokens=12)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage.completion_tokens <= 36


@check
def n_streams_every_choice():
    reasons = {}
    for chunk in chat(n=2, stream=True, temperature=1, seed=5, max_tokens=6):
        for choice in chunk.choices:
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert sorted(reasons) == [0, 1], reasons


@check
def chat_logprobs_are_sorted_and_spell_the_answer():
    answer = chat(logprobs=True, top_logprobs=3, max_tokens=5).choices[0]
    tokens = answer.logprobs.content
    assert len(tokens) == 5
    for token in tokens:
        top = [candidate.logprob for candidate in token.top_logprobs]
        assert len(top) == 3 and top == sorted(top, reverse=True) and max(top) <= 0
        assert token.logprob == top[0], "greedy takes the most probable"
    spelt = b"".join(bytes(token.bytes) for token in tokens).decode()
    assert spelt == answer.message.content, (spelt, answer.message.content)


@check
def logprobs_stream_with_their_tokens():
    chunks = list(chat(logprobs=True, top_logprobs=2, max_tokens=4, stream=True))
    tokens = [token for chunk in chunks for choice in chunk.choices if choice.logprobs for token in choice.logprobs.content]
    whole = chat(logprobs=True, top_logprobs=2, max_tokens=4).choices[0].logprobs.content
    assert [token.logprob for token in tokens] == [token.logprob for token in whole]


@check
def completion_logprobs_have_the_old_format():
    logprobs = complete(logprobs=2, max_tokens=4).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 4
    assert logprobs.text_offset[0] == 0 and logprobs.text_offset == sorted(logprobs.text_offset)


@check
def tools_pass_through():
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
    answer = chat([{"role": "user", "content": "Weather in Paris?"}], tools=[tool], tool_choice="auto")
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    answer = chat(tools=[tool], tool_choice="none")
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls


@check
def tool_messages_are_taken():
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    assert chat(messages).usage.prompt_tokens > 10


@check
def a_wrong_model_is_not_found():
    refused(openai.NotFoundError, lambda: chat(model="nope"), "nope", "does not exist")
    refused(openai.NotFoundError, lambda: chat(model="nope", stream=True), "nope")


@check
def a_prompt_that_is_too_long_is_refused_with_numbers():
    limit = CLIENT.models.list().data[0].max_model_len
    refused(openai.BadRequestError, lambda: complete([5] * (limit + 1)), str(limit), str(limit + 1))
    words = [{"role": "user", "content": "word " * (limit + 100)}]
    refused(openai.BadRequestError, lambda: chat(words, stream=True), str(limit))


@check
def an_output_that_could_never_fit_is_refused():
    refused(openai.BadRequestError, lambda: chat(max_tokens=10_000_000), "10000000")


@check
def bad_json_is_refused():
    status, body = raw("POST", "/v1/chat/completions", '{"model": "x", "messages": [')
    assert status == 400 and body["error"]["code"] == 400 and body["error"]["message"], body
    status, body = raw("POST", "/v1/chat/completions", "[]")
    assert status == 400, body


@check
def missing_messages_are_refused_by_name():
    status, body = raw("POST", "/v1/chat/completions", json.dumps({"model": MODEL}))
    assert status == 400 and "messages" in json.dumps(body["error"]), body


@check
def an_unknown_path_is_not_found():
    status, _ = raw("GET", "/v1/nothing-here")
    assert status == 404


@check
def a_cancelled_stream_frees_its_replica():
    with chat(stream=True, max_tokens=2000, extra_body={"ignore_eos": True}) as stream:
        pieces = [next(iter(stream)) for _ in range(4)]
    assert pieces
    # Bounded by tries, each of which is a round trip.
    for _ in range(2000):
        _, body = raw("GET", "/baton/v1/requests")
        if not body["requests"]:
            break
    assert body["requests"] == [], body
    assert chat().choices[0].message.content


@check
def a_request_id_comes_back():
    answer = CLIENT.chat.completions.with_raw_response.create(
        model=MODEL, messages=QUESTION, max_tokens=1, extra_headers={"x-request-id": "client-id-1"}
    )
    assert answer.headers["x-request-id"] == "client-id-1"
    minted = CLIENT.chat.completions.with_raw_response.create(model=MODEL, messages=QUESTION, max_tokens=1)
    assert minted.headers["x-request-id"]
    assert minted.parse()._request_id == minted.headers["x-request-id"]


@check
def a_decision_is_on_record_under_its_request_id():
    CLIENT.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1, extra_headers={"x-request-id": "explain-me"})
    status, record = raw("GET", "/baton/v1/decisions/explain-me")
    assert status == 200 and record["x_request_id"] == "explain-me" and record["quotes"], record


@check
def streams_run_side_by_side():
    def one(number):
        messages = [{"role": "user", "content": f"Count from {number} upwards."}]
        return number, text_of(chat(messages, stream=True, max_tokens=12))

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        together = dict(pool.map(one, range(6)))
    assert together[3] == one(3)[1], "an answer does not depend on what runs beside it"


@check
def the_async_client_streams():
    async def run():
        async with openai.AsyncOpenAI(base_url=BASE + "/v1", api_key="unused", max_retries=0) as client:
            options = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 16}
            stream = await client.chat.completions.create(stream=True, **options)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    assert asyncio.run(run()) == chat().choices[0].message.content


@check
def completions_continue_text():
    answer = complete()
    assert answer.object == "text_completion" and "Paris" in answer.choices[0].text, answer
    assert "".join(chunk.choices[0].text for chunk in complete(stream=True)) == answer.choices[0].text


@check
def completions_take_several_prompts_and_token_ids():
    status, tokens = raw("POST", "/tokenize", json.dumps({"model": MODEL, "prompt": "The capital of France is"}))
    assert status == 200
    one = complete().choices[0].text
    assert complete(tokens["tokens"]).choices[0].text == one
    several = complete(["One two", "The capital of France is"])
    assert [choice.index for choice in several.choices] == [0, 1] and several.choices[1].text == one


@check
def echo_repeats_the_prompt():
    assert complete(echo=True).choices[0].text == "The capital of France is" + complete().choices[0].text


@check
def temperature_has_its_extremes():
    assert chat(temperature=0).choices[0].message.content == chat(temperature=0).choices[0].message.content
    assert chat(temperature=2, max_tokens=8, seed=1).usage.completion_tokens <= 8
    refused(openai.BadRequestError, lambda: chat(temperature=-1), "temperature")
    assert chat(temperature=1, top_p=1e-9, seed=3).choices[0].message.content == chat().choices[0].message.content
    refused(openai.BadRequestError, lambda: chat(top_p=1.5), "top_p")


@check
def unicode_survives_both_ways():
    text = "Grüße, 世界! 🚀 née"
    status, tokens = raw("POST", "/tokenize", json.dumps({"model": MODEL, "prompt": text, "add_special_tokens": False}))
    assert status == 200
    assert complete(tokens["tokens"], echo=True, max_tokens=1).choices[0].text.startswith(text)
    streamed = text_of(chat([{"role": "user", "content": "Repeat: 世界 🚀"}], stream=True, max_tokens=24))
    assert "\ufffd" not in streamed.rstrip("\ufffd"), streamed


@check
def a_system_prompt_counts():
    hello = {"role": "user", "content": "Hello! Who are you?"}
    plain = chat([hello], max_tokens=32)
    pirate = chat([{"role": "system", "content": "You are a pirate called Jack. Talk like a pirate."}, hello], max_tokens=32)
    assert pirate.usage.prompt_tokens != plain.usage.prompt_tokens
    assert pirate.choices[0].message.content != plain.choices[0].message.content


@check
def content_parts_are_joined_text():
    turns = [("user", "My name is Ada."), ("assistant", "Hello Ada!"), ("user", "What is the capital of Italy?")]
    plain = chat([{"role": role, "content": text} for role, text in turns])
    parts = chat([{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns])
    assert parts.choices[0].message.content == plain.choices[0].message.content
    assert parts.usage.prompt_tokens == plain.usage.prompt_tokens
    assert plain.usage.prompt_tokens > chat([{"role": "user", "content": turns[2][1]}]).usage.prompt_tokens


@check
def a_logit_bias_bans_and_forces():
    status, tokens = raw("POST", "/tokenize", json.dumps({"model": MODEL, "prompt": " Paris", "add_special_tokens": False}))
    paris = tokens["tokens"][0]
    assert "Paris" not in complete(logit_bias={str(paris): -100}, max_tokens=1).choices[0].text
    assert complete(logit_bias={str(paris): 100}, max_tokens=3).choices[0].text == " Paris" * 3


@check
def penalties_change_the_answer():
    prompt = "la la la la la la la la"
    plain = complete(prompt, max_tokens=12).choices[0].text
    assert complete(prompt, max_tokens=12, frequency_penalty=2, presence_penalty=2).choices[0].text != plain
    refused(openai.BadRequestError, lambda: complete(prompt, presence_penalty=3), "presence_penalty")


@check
def unknown_fields_pass():
    answer = chat(extra_body={"a_field_of_tomorrow": {"deep": [1, None]}}, user="someone", metadata={"k": "v"})
    assert answer.choices[0].message.content == chat().choices[0].message.content


@check
def engine_options_pass():
    answer = chat(max_tokens=20, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 20 and answer.choices[0].finish_reason == "length"
    answer = chat(max_tokens=12, extra_body={"min_tokens": 10})
    assert answer.usage.completion_tokens >= 10
    ids = chat(max_tokens=4, extra_body={"return_token_ids": True})
    assert len(ids.choices[0].token_ids) == 4 and len(ids.prompt_token_ids) == ids.usage.prompt_tokens


@check
def a_repeated_prompt_is_found_in_the_cache():
    messages = [{"role": "user", "content": "Facts: " + " ".join(f"box {n} has {n * 7} apples." for n in range(20))}]
    chat(messages, max_tokens=1)
    usage = chat(messages, max_tokens=1).usage
    assert usage.prompt_tokens_details.cached_tokens > usage.prompt_tokens // 2, usage


@check
def tokenize_counts_what_usage_counts():
    status, tokens = raw("POST", "/tokenize", json.dumps({"model": MODEL, "messages": QUESTION}))
    assert status == 200 and tokens["count"] == chat(max_tokens=1).usage.prompt_tokens
    status, text = raw("POST", "/detokenize", json.dumps({"model": MODEL, "tokens": tokens["tokens"]}))
    assert status == 200 and "capital of France" in text["prompt"]


@check
def what_the_engine_lacks_is_not_found():
    try:
        CLIENT.embeddings.create(model=MODEL, input="x")
    except openai.NotFoundError:
        return
    raise AssertionError("a text model gave embeddings")


@check
def liveness_and_readiness_are_told():
    address = urllib.parse.urlparse(BASE)
    for path in ("/health", "/live", "/ready", "/metrics"):
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
        connection.request("GET", path)
        assert connection.getresponse().status == 200, path
        connection.close()


def main():
    failed = 0
    for function in CHECKS:
        name = function.__name__.replace("_", " ")
        try:
            function()
        except Exception:  # noqa: BLE001 - a check that fails must not hide the others
            failed += 1
            print(f"FAIL {name}\n{traceback.format_exc()}", flush=True)
        else:
            print(f"ok   {name}", flush=True)
    print(f"{len(CHECKS) - failed} of {len(CHECKS)} checks passed with openai {openai.__version__}")
    sys.exit(1 if failed else 0)


main()
