"""`tpdet tape`: an unmodified client recorded, checked, forked; what a tape and a fork refuse."""

import errno
import json
import os
import signal
import stat
import sys

import pytest

from tests.lib.server.harness import Server
from tests.lib.text.made_conversations import CHATML
from tests.lib.tree import ROOT
from tpdet.audit.recorded import Difference, Scored
from tpdet.cli import main
from tpdet.client.address import Address
from tpdet.errors import CheckpointError, DisagreementError, UsageError
from tpdet.tools.tape import tape_file
from tpdet.tools.tape.answers import edited_bytes, read_edited, shown_answer
from tpdet.tools.tape.check import CheckedTape, TurnVerdict
from tpdet.tools.tape.fork import Fork
from tpdet.tools.tape.run import child_environment
from tpdet.tools.tape.tape_file import End, Head, Ids, RunTape, TapeWriter, Turn, read_tape

KEY = "sk-tape-secret"
AGENT = (sys.executable, str(ROOT / "tests/tools/tape/agent.py"))
MESSAGES_AGENT = (sys.executable, str(ROOT / "tests/tools/tape/messages_agent.py"))
RESPONSES_AGENT = (sys.executable, str(ROOT / "tests/tools/tape/responses_agent.py"))
CHATS = "/v1/chat/completions"
POST = """import os, sys, urllib.request
head = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}
head['Content-Type'] = 'application/json'
url, body = os.environ['OPENAI_BASE_URL'] + sys.argv[1], ''.join(sys.argv[2:]).encode() or None
answer = urllib.request.urlopen(urllib.request.Request(url, body, head))
print(answer.read().decode(), end='')"""
ASK = f'{sys.executable} -SEs -c "{POST}"'
"""Asks the address in the environment: PATH [BODY]."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("s")
    keys = folder / "keys"
    keys.write_text(KEY + "\n")
    keys.chmod(0o600)
    template = folder / "template.jinja"
    template.write_text(CHATML)
    flags = ("--api-key-file", str(keys), "--chat-template", str(template))
    flags += ("--tool-call-parser", "auto", "--max-model-len", "2048")
    server = Server(folder, *flags, marks=("<tool_call>", "</tool_call>"))
    server.by = ("--url", server.url, "--api-key-file", keys)
    yield server
    assert server.stop() == 0


@pytest.fixture
def tape(server, capfd):
    """A function that runs `tpdet tape`: its exit code, and all that it and its command printed."""

    def run(name, *arguments, by=server.by):
        code = main(["tape", name, *map(str, (*(() if name == "show" else by), *arguments))])
        return code, *capfd.readouterr()

    return run


def with_changed(path, change):
    """A copy of a tape, its lines changed in place."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change({(line["object"], line.get("turn")): line for line in lines})
    copy = path.with_name("changed.tape")
    copy.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return copy


def test_an_unmodified_client_is_recorded_checked_and_forked(server, tape, tmp_path):
    path = tmp_path / "run.tape"
    code, printed, said = tape("record", "-o", path, "--", *AGENT, "Hi", "there")
    assert code == 0 and "6 turns, 5 answers; tape digest" in said, said
    told = json.loads(printed)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert KEY not in path.read_text() and "uthorization" not in path.read_text()
    recorded = read_tape(str(path))
    assert [turn.status for turn in recorded.turns] == [200, 200, 400, 200, 200, 200]
    assert recorded.turns[1].event_stream and recorded.turns[1].answer.endswith("data: [DONE]\n\n")
    assert shown_answer(recorded.turns[1])["choices"][0]["message"]["content"] == told[3]["content"]

    code, printed, _ = tape("check", path)
    assert code == 0 and "6 turns, 5 answers, 36 tokens: 5 equal, 0 differ, 0 cannot" in printed
    assert recorded.digest in printed

    code, printed, _ = tape("show", path, "--turn", "2")
    edited = tmp_path / "edited.json"
    edited.write_text(printed.replace(told[3]["content"], "No."))
    fork, command = tmp_path / "fork.tape", (*AGENT, "Hi", "there")
    at = (path, "--turn", "2", "--edit", edited, "-o", fork)
    code, printed, said = tape("fork", *at, "--", *command)
    assert code == 0, said
    again = json.loads(printed)
    assert again[3]["content"] == "No." and again[:3] == told[:3] and again[4:] == told[4:]
    forked = read_tape(str(fork))
    assert [turn.source for turn in forked.turns[:3]] == ["tape", "edit", "server"]
    assert forked.turns[0].answer == recorded.turns[0].answer and forked.digest != recorded.digest
    code, printed, _ = tape("check", fork)
    assert code == 0 and "6 turns, 4 answers, 30 tokens: 4 equal" in printed
    code, printed, _ = tape("show", fork)
    assert '   2  POST /v1/chat/completions  200, stream, edit  "No."' in printed

    # A planted change is named by its turn, its token and its field.
    def token(lines):
        lines["ids", 4]["body"]["choices"][1]["token_ids"][2] = 65

    code, printed, _ = tape("check", with_changed(path, token))
    assert code == 1 and printed.startswith(
        "turn 4 (POST /v1/completions), choice 1, token 2: recorded id 65, log-probability -"
    )

    def bits(lines):
        lines["ids", 1]["body"]["choices"][0]["logprob_bits"][1] = "bf000000"

    code, printed, _ = tape("check", with_changed(path, bits))
    first, *_ = printed.splitlines()
    assert code == 1 and first.startswith("turn 1 (POST /v1/chat/completions), choice 0, token 1")
    assert "log-probability -0.5000000 (bits bf000000), computed" in first

    def message(lines):
        lines["turn", 2]["request"] = lines["turn", 2]["request"].replace("there", "These")

    code, printed, said = tape("check", with_changed(path, message))
    assert code == 78 and "turn 2 (POST /v1/chat/completions) cannot be compared: " in printed
    assert "other ids of the prompt than were recorded" in printed and "5 answers" in printed

    def shown(lines):
        stream = lines["turn", 2]
        stream["answer"] = stream["answer"].replace('"content":"', '"content":"!', 1)

    code, printed, _ = tape("check", with_changed(path, shown))
    assert code == 1 and "turn 2" in printed and "answer.choices[0].message.content: " in printed

    def lost(lines):
        lines["ids", 5].update(body=None, reason="no server answers")

    code, printed, said = tape("check", with_changed(path, lost))
    assert code == 78 and "turn 5" in printed and "without its ids: no server answers" in printed


def test_calls_of_tools_and_their_results_are_checked(tape, tmp_path):
    """A stream that calls, then the same request whole, then one with the call and its result."""
    arguments = '{"city": "Bonn"}'
    said = f'\ue003\n{{"name": "weather", "arguments": {arguments}}}\n\ue004\ue002'
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    talk = [{"role": "user", "content": "Is it raining?"}]
    body = {"model": "demo", "messages": talk, "tools": [tool], "seed": 3, "max_tokens": 100}
    first = body | {"cache_salt": f"text={said}"}
    call = {"id": "call_1", "type": "function"}
    call["function"] = {"name": "weather", "arguments": arguments}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "It rains."}
    told = [*talk, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    asks = [first | {"stream": True}, first, body | {"messages": told, "max_tokens": 3}]
    script = "; ".join(f"{ASK} {CHATS[3:]} '{json.dumps(one)}'" for one in asks)
    path = tmp_path / "t"
    code, _, said = tape("record", "-o", path, "--", "sh", "-c", script)
    assert code == 0 and "3 turns, 3 answers; tape digest" in said
    streamed, whole, _ = map(shown_answer, read_tape(str(path)).turns)
    assert streamed["choices"][0]["message"]["tool_calls"][0]["function"] == call["function"]
    for name in ("content", "tool_calls"):
        messages = [answer["choices"][0]["message"] for answer in (streamed, whole)]
        assert messages[0].get(name) == messages[1].get(name)
    code, printed, _ = tape("check", path)
    assert code == 0 and "3 answers" in printed and "3 equal" in printed, printed

    def another_result(lines):
        lines["turn", 3]["request"] = lines["turn", 3]["request"].replace("It rains", "It snows")

    code, printed, _ = tape("check", with_changed(path, another_result))
    assert code == 78 and printed.startswith("turn 3 (POST /v1/chat/completions) cannot be")

    def another_call(lines):
        lines["turn", 1]["answer"] = lines["turn", 1]["answer"].replace('"weather"', '"leather"')

    code, printed, _ = tape("check", with_changed(path, another_call))
    assert code == 1 and printed.startswith(
        "turn 1 (POST /v1/chat/completions), answer.choices[0].message.tool_calls[0].function.name"
    )


def changes_are_found(tape, path, url, last, answer, shown):
    """One of turn 1's answer is told as `shown`; one of a token and of a result in turn `last` too.

    answer: the text that is changed, and what it becomes.
    """

    def checked(change):
        code, printed, _ = tape("check", with_changed(path, change))
        return code, printed.splitlines()[0]

    def text(lines):
        lines["turn", 1]["answer"] = lines["turn", 1]["answer"].replace(*answer)

    assert checked(text) == (1, f"turn 1 ({url}), {shown}")

    def token(lines):
        lines["ids", last]["body"]["token_ids"][2] = 65

    code, first = checked(token)
    assert code == 1
    assert first.startswith(f"turn {last} ({url}), choice 0, token 2: recorded id 65")

    def result(lines):
        turn = lines["turn", last]
        turn["request"] = turn["request"].replace("It rains", "It snows")

    code, first = checked(result)
    assert code == 78 and "other ids of the prompt than were recorded" in first


def forked(tape, path, folder, agent):
    """What an agent prints whose first answer was edited."""
    _, printed, _ = tape("show", path, "--turn", "1")
    edited = folder / "edited.json"
    edited.write_text(printed.replace("Let me see.", "No."))
    at = ("--turn", "1", "--edit", edited)
    code, printed, said = tape("fork", path, *at, "--", *agent)
    assert code == 0, said
    return json.loads(printed)


def test_messages_of_anthropics_client_are_recorded_checked_and_forked(server, tape, tmp_path):
    path, url = tmp_path / "run.tape", "POST /v1/messages"
    code, printed, said = tape("record", "-o", path, "--", *MESSAGES_AGENT)
    assert code == 0 and "3 turns, 2 answers; tape digest" in said, said
    told = json.loads(printed)
    assert told[:2] == ["Let me see.", {"city": "Bonn"}]
    recorded = read_tape(str(path))
    streamed, _, whole = map(shown_answer, recorded.turns)
    assert [block["type"] for block in streamed["content"]] == ["text", "tool_use"]
    assert streamed["content"][1]["input"] == {"city": "Bonn"}
    for number, shown in ((1, streamed), (3, whole)):
        assert shown["content"] == recorded.ids[number].body["content"]
    room = 2048 - streamed["usage"]["input_tokens"]  # what the limit was cut to
    assert recorded.ids[1].origin["max_tokens"] == room
    code, printed, _ = tape("check", path)
    assert code == 0 and "3 turns, 2 answers" in printed and "2 equal" in printed, printed

    shown = 'answer.content[0].text: recorded "let me see.", computed "Let me see."'
    changes_are_found(tape, path, url, 3, ('"text":"L"', '"text":"l"'), shown)
    assert forked(tape, path, tmp_path, MESSAGES_AGENT)[:2] == ["No.", {"city": "Bonn"}]


@pytest.mark.slow
def test_responses_of_openais_client_are_recorded_checked_and_forked(server, tape, tmp_path):
    path, url = tmp_path / "run.tape", "POST /v1/responses"
    code, printed, said = tape("record", "-o", path, "--", *RESPONSES_AGENT)
    assert code == 0 and "2 turns, 2 answers; tape digest" in said, said
    told = json.loads(printed)
    assert told[:2] == ["Let me see.", {"city": "Bonn"}]
    recorded = read_tape(str(path))
    streamed, whole = map(shown_answer, recorded.turns)
    assert [item["type"] for item in streamed["output"]] == ["message", "function_call"]
    for number, shown in ((1, streamed), (2, whole)):
        assert shown["output"] == recorded.ids[number].body["output"]
    room = 2048 - streamed["usage"]["input_tokens"]  # what the limit was cut to
    assert recorded.ids[1].origin["max_tokens"] == room == streamed["max_output_tokens"]
    code, printed, _ = tape("check", path)
    assert code == 0 and "2 turns, 2 answers" in printed and "2 equal" in printed, printed

    was, computed = (json.dumps(json.dumps({"city": city})) for city in ("Born", "Bonn"))
    shown = f"answer.output[1].arguments: recorded {was}, computed {computed}"
    changes_are_found(tape, path, url, 2, ("Bonn", "Born"), shown)
    assert forked(tape, path, tmp_path, RESPONSES_AGENT)[:2] == ["No.", {"city": "Bonn"}]


def test_a_fork_stops_at_a_request_that_is_not_recorded(server, tape, tmp_path):
    first = {"messages": [{"role": "user", "content": "Hi"}], "user": "a", "n": 1}
    answer = json.dumps({"choices": [{"index": 0, "message": {"role": "assistant"}}]})
    path = tmp_path / "t"
    writer = TapeWriter(path, None)
    for number in (1, 2):
        writer.add(
            Turn(
                turn=number,
                method="POST",
                path=CHATS,
                request=json.dumps(first),
                status=200,
                answer=answer,
            )
        )
    writer.close()
    asks = f"{ASK} {CHATS[3:]}"
    same = json.dumps({"n": 1.0, "user": "b", "messages": [{"content": "Hi", "role": "user"}]})
    other = json.dumps(first).replace("Hi", "Ho")
    script = f"{asks} '{same}'; {asks} '{other}'; exec sleep 60"
    code, printed, said = tape("fork", path, "--turn", "3", "--", "sh", "-c", script)
    assert code == 2 and "--turn 3" in said and "has 2 turns" in said
    code, printed, said = tape("fork", path, "--turn", "2", "--", "sh", "-c", f"{asks} '{same}'")
    assert code == 0 and printed == answer
    edit = tmp_path / "edit"
    edit.write_text(answer)
    run = ("--edit", edit, "--", "sh", "-c", script)
    code, printed, said = tape("fork", path, "--turn", "2", *run)
    assert code == 78 and printed == answer  # and no second one
    assert "turn 2 was not asked again as" in said
    assert 'messages[0].content: recorded "Hi", asked now "Ho"' in said
    code, _, said = tape("fork", path, "--turn", "2", "--edit", edit, "--", "true")
    assert code == 78 and "the command ended before it asked for turn 1" in said


def test_a_command_has_its_exit_code_its_signals_and_an_address(server, tape, tmp_path):
    path = tmp_path / "t"
    code, printed, _ = tape("record", "-o", path, "--", "sh", "-c", "echo $OPENAI_API_KEY; exit 7")
    assert code == 7 and printed == KEY + "\n" and read_tape(str(path)).is_whole
    kill = "trap 'exit 9' USR1; kill -USR1 $PPID; while :; do sleep 0.02; done"
    assert tape("record", "-o", tmp_path / "u", "--", "sh", "-c", kill)[0] == 9
    end = ("--my_flag", "sh", "-c", "kill -KILL $$")
    assert tape("record", "-o", tmp_path / "v", "--", "env", *end[1:])[0] == 128 + signal.SIGKILL
    code, _, said = tape("record", "-o", path, "--", "true")
    assert code == 2 and "is never written over" in said
    code, _, said = tape("record", "-o", tmp_path / "w", "--", "no_such_command")
    assert code == 66 and "no command 'no_such_command'" in said
    for name, text in (("none", "#!/no/such/program\n"), ("bare", "true\n")):
        script = tmp_path / name
        script.write_text(text)
        script.chmod(0o700)
        code, _, said = tape("record", "-o", tmp_path / f"{name}.tape", "--", script)
        assert code == 66 and f"/{name}' cannot be run (" in said and "Traceback" not in said
    assert tape("record", "-o", tmp_path / "no" / "t", "--", "true")[0] == 2
    code, printed, _ = tape("record", "-o", tmp_path / "x", "--", "echo", "--my_flag", "--", "-o")
    assert code == 0 and printed == "--my_flag -- -o\n"
    by = ("--url", "http://127.0.0.1:1")
    code, _, said = tape("record", "-o", tmp_path / "y", "--", "true", by=by)
    assert code == 66 and "no server answers" in said and not (tmp_path / "y").exists()


def test_no_key_of_another_service_reaches_the_server():
    others = {"OPENAI_API_KEY": "sk-1", "ANTHROPIC_API_KEY": "sk-2", "NO_PROXY": "x", "A": "b"}
    mine = child_environment(others, 5, None)
    assert mine["OPENAI_API_KEY"] == mine["ANTHROPIC_AUTH_TOKEN"] == "none"
    assert "ANTHROPIC_API_KEY" not in mine and mine["A"] == "b"
    assert mine["NO_PROXY"] == "x,127.0.0.1" and mine["no_proxy"] == "127.0.0.1"
    assert mine["OPENAI_BASE_URL"] == mine["OPENAI_API_BASE"] == "http://127.0.0.1:5/v1"
    assert mine["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:5"
    assert child_environment({}, 5, "k")["OPENAI_API_KEY"] == "k"


def test_a_full_disk_ends_the_tape_behind_a_whole_line_and_not_the_command(
    server, tape, tmp_path, monkeypatch
):
    path, write = tmp_path / "t", os.write

    def full(descriptor, data):
        if b'"object":"turn"' in bytes(data[:20]):
            write(descriptor, data[:9])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(tape_file.os, "write", full)
    asks = f"{ASK} /models > /dev/null; echo on"
    code, printed, said = tape("record", "-o", path, "--", "sh", "-c", asks)
    assert code == 71 and printed == "on\n" and "the command goes on" in said
    assert "No space left" in said
    assert tape("record", "-o", tmp_path / "u", "--", "sh", "-c", asks + "; exit 4")[0] == 4
    recorded = read_tape(str(path))
    assert not recorded.turns and not recorded.is_whole


def test_a_damaged_tape_is_refused_by_its_line(tmp_path, tape):
    path = tmp_path / "t"
    turn = Turn(turn=1, method="GET", path="/", request="")

    def written(*lines):
        path.write_bytes(b"\n".join(map(tape_file.msgspec.json.encode, lines)))
        return str(path)

    head = Head("tpdet-tape-1", "0")
    assert read_tape(written(head, turn, End(1))).is_whole
    for lines, why in (
        ((Head("tpdet-tape-9", "0"), End(0)), "no tape of the format tpdet-tape-1"),
        ((turn, End(1)), "no tape of the format"),
        ((head, turn, turn, End(1)), "has turn 1 twice"),
        ((head, turn, End(2)), "ends with 2 turns, and has the turns 1: lines are missing"),
        ((head, turn, End(1 << 70)), "ends with 1180591620717411303424 turns"),
        ((head, {"object": "turn", "turn": "1"}), "line 2 is no line of a tape"),
    ):
        with pytest.raises(CheckpointError, match=why):
            read_tape(written(*lines))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="damaged or cut off"):
        read_tape(str(path))
    assert tape("check", tmp_path / "none")[0] == 66
    written(head, turn, End(1))
    assert tape("check", path)[0] == 66  # there is nothing to check
    bodies = (None, {}, *({"tpdet": other} for other in (None, 5, "x", [1], {})))
    digests = {read_tape(written(head, turn, Ids(1, body))).digest for body in bodies}
    assert len(digests) == 1 and Ids(1, {"tpdet": {"replay_digest": "d"}}).origin
    for bits, said in (("c0a15924", "-5.0421314"), ("zz", "that is no fp32"), ("c0", "no fp32")):
        verdict = TurnVerdict(turn, [Difference(0, 3, Scored(7, bits), None)])
        assert said in next(CheckedTape(read_tape(str(path)), [verdict], 0.0).lines())


@pytest.mark.parametrize("other", [None, 5, "x", [], {}, [None], [[]], [5, {"index": 0}]])
def test_a_stream_of_odd_events_is_shown_and_edited(other):
    for event in (
        {"choices": other},
        {"choices": [{"delta": other}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": other}}]},
    ):
        first = {"choices": [{"index": 0, "delta": {"content": "a"}}]}
        for events in ([event], [first, event], [event, first]):
            data = "".join(f"data: {json.dumps(one)}\n\n" for one in events)
            shown = shown_answer(asked(1, {}, status=200, event_stream=True, answer=data))
            assert isinstance(shown, dict)
    answer = {"choices": [{"message": {"content": "a", "tool_calls": other}}]}
    body = {"stream": True, "stream_options": other}
    assert b'"content":"a"' in edited_bytes(read_edited(json.dumps(answer).encode(), "f"), body)[1]


def asked(number, body, method="POST", **more):
    return Turn(turn=number, method=method, path=CHATS, request=json.dumps(body), **more)


def test_turns_that_ran_together_are_found_by_what_they_ask():
    recorded = [asked(n, {"seed": n}, status=200, answer=str(n)) for n in (1, 2, 3, 4, 5)]
    recorded[3] = asked(4, {}, "GET", answer="4")
    tape = RunTape("t", Head("", ""), recorded, {2: Ids(2, {"a": 1})}, True)
    fork = Fork(tape, 5, None)
    given = [fork(asked(n, {"seed": seed})) for n, seed in ((1, 3), (2, 1))]
    assert [turn.answer for turn in given] == ["3", "1"] and given[0].source == "tape"
    assert fork(asked(3, {"seed": 5})) is None  # it ran beside these: the server answers
    assert fork(asked(4, {"x": 1}, "GET")) is None
    with pytest.raises(
        DisagreementError, match=r"turn 2 was not asked .* seed: recorded 2, asked now 7"
    ):
        fork(asked(5, {"seed": 7}))
    with pytest.raises(DisagreementError, match="before it asked for turn 2 of t again"):
        fork.check_replayed()
    assert fork(asked(6, {"seed": 2})).answer == "2" and fork.replayed == {6: Ids(6, {"a": 1})}
    fork.check_replayed()  # nobody has to read again what was read
    assert fork(asked(7, {"seed": 8})) is None and fork(asked(8, {}, "GET")).answer == "4"


def test_an_edited_answer_has_the_form_that_its_request_asks_for():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    chat = {
        "object": "chat.completion",
        "tpdet": {"seed": 1},
        "usage": {"total_tokens": 3},
        "choices": [
            {"index": 0, "message": message, "finish_reason": "tool_calls"},
            {"index": 1, "message": {"role": "assistant", "content": "b"}, "finish_reason": "stop"},
        ],
    }
    whole = {**chat, "system_fingerprint": None, "tpdet": {"edited": True}}
    assert edited_bytes(chat, {})[0] is False and json.loads(edited_bytes(chat, {})[1]) == whole
    options = {"stream": True, "stream_options": {"include_usage": True}}
    is_stream, data = edited_bytes(chat, options)
    turn = Turn(
        turn=1, method="POST", path="", request="", event_stream=is_stream, answer=data.decode()
    )
    assert is_stream and shown_answer(turn) == whole
    text = {"object": "text_completion", "choices": [{"text": "x", "finish_reason": "stop"}]}
    is_stream, data = edited_bytes(text, {"stream": True})
    assert b'"text":"x"' in data and b'"usage"' not in data and data.endswith(b"data: [DONE]\n\n")
    for wrong, why in ((b"[]", "no answer with choices"), (b'{"choices":[{}]}', "neither")):
        with pytest.raises(UsageError, match=why):
            read_edited(wrong, "edited.json")


def test_an_address_with_a_path_keeps_it():
    assert Address.parse("https://h/x/v1").prefix == "/x"
