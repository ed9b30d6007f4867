"""Real clients against a server, each in its default mode: python clients.py URL MODEL FOLDER [NAME ...] [-NAME ...].

FOLDER: of the model, for clients that need its tokenizer or compare with transformers. Prints a line for each client;
the exit status is 1 where one fails. `make clients` makes the environment, starts the server and runs this.
"""

import inspect
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
HERE = Path(__file__).parent
NODE = HERE.parents[1] / "build" / "clients" / "node"
URL, MODEL, FOLDER = sys.argv[1:4]
KEY = {"base_url": f"{URL}/v1", "api_key": "none"}
ASKED = [{"role": "user", "content": "What is the weather in Rome?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Bern"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}}]
CITIES = ("Rome", "Bern")


def _called(calls):
    [call] = calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in CITIES
    return call


def openai_chat():
    import openai

    client = openai.OpenAI(**KEY)
    asked = {"model": MODEL, "tools": TOOLS, "max_tokens": 60, "temperature": 0}
    free = client.chat.completions.create(messages=ASKED, **asked).choices[0].message
    reply = client.chat.completions.create(
        messages=ASKED, tool_choice="required", parallel_tool_calls=False, **asked
    ).choices[0]
    assert reply.finish_reason == "tool_calls"
    call = _called(reply.message.tool_calls)
    history = [*ASKED, reply.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert client.chat.completions.create(messages=history, **asked).choices
    assert client.chat.completions.create(messages=[*ASKED, free.model_dump(), *ASKED], **asked).choices


def openai_responses():
    import openai

    client = openai.OpenAI(**KEY)
    first = client.responses.create(model=MODEL, input="Hi", max_output_tokens=12)
    asked = {"model": MODEL, "input": "Go on", "max_output_tokens": 12, "previous_response_id": first.id}
    with client.responses.stream(**asked) as stream:
        assert [event for event in stream if event.type == "response.output_text.delta"]
    tool = {"type": "function", **TOOLS[0]["function"]}
    asked = {"model": MODEL, "tools": [tool], "max_output_tokens": 60}
    reply = client.responses.create(input=ASKED, tool_choice={"type": "function", "name": "weather"}, **asked)
    [call] = reply.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    assert client.responses.create(input=[*ASKED, call, result], **asked).output


def _by_node(name):
    script = NODE / name
    script.write_text((HERE / name).read_text())  # beside the packages
    subprocess.run(["node", script, URL, MODEL], check=True, cwd=NODE, timeout=300)


def openai_npm():
    _by_node("run_tools.mjs")


def vercel():
    _by_node("vercel.mjs")


def _by_program(command, **variables):
    """Standard output of a program of npm's, in a home of its own."""
    with tempfile.TemporaryDirectory(dir=NODE) as home:
        for name, text in variables.pop("files").items():
            Path(home, name).write_text(text)
        names = ("HOME", "PWD", "CODEX_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")
        ran = subprocess.run(
            [NODE / "node_modules" / ".bin" / command[0], *command[1:]],
            cwd=home,
            env=os.environ | dict.fromkeys(names, home) | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=600,
        )
    return ran.stdout


def codex():
    provider = f'name = "local"\nbase_url = "{URL}/v1"\nwire_api = "responses"\nrequest_max_retries = 0\n'
    config = f'model = "{MODEL}"\nmodel_provider = "local"\ncheck_for_update_on_startup = false\n'
    config += f"[analytics]\nenabled = false\n[model_providers.local]\n{provider}stream_max_retries = 0\n"
    command = ["codex", "exec", "--skip-git-repo-check", "--sandbox", "read-only", "Say hello."]
    assert _by_program(command, files={"config.toml": config}).strip()


def opencode():
    model = {"name": MODEL, "limit": {"context": 8192, "output": 32}}
    local = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{URL}/v1"}, "models": {MODEL: model}}
    named = dict.fromkeys(("model", "small_model"), f"local/{MODEL}")
    config = {**named, "autoupdate": False, "share": "disabled", "provider": {"local": local}}
    off = dict.fromkeys(("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD"), "1")
    off = {f"OPENCODE_DISABLE_{name}": value for name, value in off.items()}
    assert _by_program(["opencode", "run", "Say hello."], files={"opencode.json": json.dumps(config)}, **off).strip()


def openai_agents():
    from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_client, set_tracing_disabled
    from openai import AsyncOpenAI

    asked = []

    @function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "sunny"

    set_default_openai_client(AsyncOpenAI(**KEY), use_for_tracing=False)
    set_tracing_disabled(True)
    settings = ModelSettings(max_tokens=60, temperature=0, tool_choice="required", parallel_tool_calls=False)
    agent = Agent(name="weather", instructions="Answer.", model=MODEL, tools=[weather], model_settings=settings)
    assert Runner.run_sync(agent, "What is the weather in Rome?", max_turns=4).final_output
    assert asked


def anthropic():
    from anthropic import Anthropic

    client = Anthropic(base_url=URL, api_key="none")
    tools = [{"name": "weather", "input_schema": CITY}]
    asked = {"model": MODEL, "max_tokens": 60, "tools": tools}
    assert client.messages.count_tokens(model=MODEL, messages=ASKED, tools=tools).input_tokens > 0
    assert client.messages.create(messages=ASKED, **asked).content
    choice = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(messages=ASKED, tool_choice=choice, **asked) as stream:
        [use] = stream.get_final_message().content
    assert use.input["city"] in CITIES
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}]}
    said = {"role": "assistant", "content": [use.model_dump()]}
    assert client.messages.create(messages=[*ASKED, said, result], **asked).content


def ollama():
    import ollama

    client = ollama.Client(host=URL)
    assert [model.model for model in client.list().models] == [MODEL]
    assert client.show(MODEL).modelinfo
    stream = client.chat(model=MODEL, messages=ASKED, stream=True, options={"num_predict": 12})
    assert "".join(part.message.content for part in stream)
    assert client.generate(model=MODEL, prompt="Hi", options={"num_predict": 12}).response
    assert client.chat(model=MODEL, messages=ASKED, tools=TOOLS, options={"num_predict": 30}).message


def litellm():
    import litellm

    asked = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
    required = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    _called(litellm.completion(messages=ASKED, max_tokens=60, **required, **asked).choices[0].message.tool_calls)
    cached = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    assert litellm.completion(messages=[{"role": "user", "content": cached}], max_tokens=8, **asked).choices
    assert litellm.responses(input="hi", max_output_tokens=12, **asked).output
    bridge = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none"}
    assert litellm.completion(messages=ASKED, max_tokens=12, **bridge).choices


def instructor():
    import instructor
    import openai
    import pydantic

    class Person(pydantic.BaseModel):
        name: str
        age: int

    client = instructor.from_openai(openai.OpenAI(**KEY))
    messages = [{"role": "user", "content": "John is 25 years old"}]
    person = client.chat.completions.create(
        model=MODEL, response_model=Person, messages=messages, max_tokens=120, temperature=0
    )
    assert isinstance(person, Person)


def pydantic_ai():
    import pydantic
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Place(pydantic.BaseModel):
        city: str
        country: str

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(**KEY))
    settings = {"max_tokens": 120, "temperature": 0}
    agent = Agent(model, output_type=Place, model_settings=settings)
    assert isinstance(agent.run_sync("Where were the Olympics in 2012?").output, Place)


def langchain():
    import pydantic
    from langchain.agents import create_agent
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    class Place(pydantic.BaseModel):
        city: str

    model = ChatOpenAI(model=MODEL, max_tokens=80, temperature=0, **KEY)
    assert create_agent(model, [weather]).invoke({"messages": ASKED})["messages"][-1].content
    assert model.bind_tools([weather], tool_choice="weather").invoke("Weather in Rome?").tool_calls
    assert isinstance(model.with_structured_output(Place).invoke("Rome"), Place)


def lm_eval():
    """A task of multiple choice, against transformers' own values."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    os.chdir(HERE / "lm_eval")
    remote = {"model": MODEL, "base_url": f"{URL}/v1/completions", "tokenized_requests": True, "num_concurrent": 2}
    found = {}
    for kind, args in (("local-completions", remote), ("hf", {"pretrained": FOLDER, "dtype": "float32"})):
        manager = TaskManager(include_path=".", include_defaults=False)
        result = simple_evaluate(kind, model_args=args, tasks=["capitals"], task_manager=manager, device="cpu")
        found[kind] = [pair[0] for sample in result["samples"]["capitals"] for pair in sample["filtered_resps"]]
    ours, theirs = found.values()
    worst = max(abs(one - other) for one, other in zip(ours, theirs, strict=True))
    print(f"lm_eval: {len(ours)} log-likelihoods, at most {worst:.1e} from transformers'")
    assert len(ours) == 15
    assert worst < 1e-3


def guidellm():
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        command = [Path(sys.executable).with_name("guidellm"), "run", "--disable-console"]
        command += ["--backend", f"kind=openai_http,target={URL},model={MODEL}", "--profile", "kind=synchronous"]
        command += ["--constraint", "kind=max_requests,count=10"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={FOLDER}", "--output", f"kind=json,path={out}"]
        subprocess.run(command, check=True, timeout=300)
        totals = json.loads(out.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (10, 0), totals


CLIENTS = {name: one for name, one in list(globals().items()) if inspect.isfunction(one) and not name.startswith("_")}


def main() -> int:
    failed = []
    asked = [name for name in sys.argv[4:] if not name.startswith("-")]
    for name in asked or [name for name in CLIENTS if f"-{name}" not in sys.argv[4:]]:
        try:
            CLIENTS[name]()
        except Exception:
            traceback.print_exc()
            failed.append(name)
        print(f"{name}: {'fails' if name in failed else 'works'}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
