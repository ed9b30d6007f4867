"""Metrics, log, page and OpenAPI document: what the server tells of itself."""

import base64
import hashlib
import json
import logging
import re
from html.parser import HTMLParser

import pytest
from serve_support import USER, serving

from ppsd_rt.serve.settings import log


def metrics(served):
    text = served.http.get("/metrics").text
    return {name: float(value) for name, value in re.findall(r"^(ppsd_\S+) (\S+)$", text, re.MULTILINE)}


def test_probes_are_counted_and_do_not_fill_the_log(engine):
    with serving(engine) as served:
        for path in ("/health", "/metrics", "/v1/models"):
            served.http.get(path)
        assert served.log.next()["path"] == "/v1/models"
        assert metrics(served)['ppsd_requests_total{path="/health",status="200"}'] == 1


def test_metrics_count_what_there_was(engine):
    with serving(engine) as served:
        reply = served.chat(max_tokens=24)
        served.post(temperature=9)
        served.http.get("/somewhere/else")
        for _ in range(3):
            served.log.next()  # which is written when the request has been counted
        found = metrics(served)
    details = reply.usage.completion_tokens_details
    assert found['ppsd_requests_total{path="/v1/chat/completions",status="200"}'] == 1
    assert found['ppsd_requests_total{path="/v1/chat/completions",status="400"}'] == 1
    assert found['ppsd_requests_total{path="other",status="404"}'] == 1
    assert found["ppsd_prompt_tokens_total"] == reply.usage.prompt_tokens
    assert found["ppsd_completion_tokens_total"] == 24
    assert found['ppsd_draft_tokens_total{verdict="accepted"}'] == details.accepted_prediction_tokens
    assert found['ppsd_draft_tokens_total{verdict="rejected"}'] == details.rejected_prediction_tokens
    assert found['ppsd_answers_total{finish_reason="length"}'] == 1
    assert found["ppsd_first_token_seconds_count"] == 1
    assert found["ppsd_answers_waiting"] == found["ppsd_answers_running"] == 0


def test_the_log_has_a_line_for_each_request_and_no_texts(engine, caplog):
    caplog.set_level(logging.INFO, "ppsd_rt.serve")
    with serving(engine, log=log) as served:
        reply = served.post(max_tokens=4)
    [line] = [message for message in caplog.messages if reply.headers["x-request-id"] in message]
    entry = json.loads(line)
    assert (entry["event"], entry["id"]) == ("request", reply.headers["x-request-id"])
    assert (entry["method"], entry["path"], entry["status"]) == ("POST", "/v1/chat/completions", 200)
    assert (entry["completion_tokens"], entry["finish"]) == (4, "length")
    assert entry["seconds"] >= 0 and entry["time"]
    assert USER[0]["content"] not in line


class Outside(HTMLParser):
    """Elements that would load something."""

    def __init__(self):
        super().__init__()
        self.found, self.labels, self.fields = [], set(), []

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.found += [value for name, value in attributes if name in ("src", "href", "action") and value != "data:,"]
        if tag == "label":
            self.labels.add(named.get("for"))
        if tag in ("input", "textarea"):
            self.fields.append(named["id"])


def test_the_page_loads_nothing_and_runs_only_its_own_script(served):
    reply = served.http.get("/")
    html, policy = reply.text, reply.headers["Content-Security-Policy"]
    assert reply.headers["Content-Type"].startswith("text/html")
    page = Outside()
    page.feed(html)
    assert page.found == ["markdown-it.js"]  # which comes with the package
    assert served.http.get("/markdown-it.js").text.startswith("/*! markdown-it ")
    assert not re.search(r"https?://|//\w+\.\w", html)
    assert "default-src 'none'" in policy
    for element in ("script", "style"):
        [text] = re.findall(f"<{element}>(.*?)</{element}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert re.search(f"{element}-src ('self' )?'sha256-{re.escape(digest)}'", policy)
    assert "text" in page.labels and len(page.fields) == 6  # the others stand inside their labels


def test_openapi_names_every_path(served):
    document = served.http.get("/openapi.json").json()
    paths = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{name}"}
    paths |= {"/v1/responses", "/v1/responses/{id}", "/v1/messages", "/v1/messages/count_tokens"}
    paths |= {"/api/chat", "/api/generate", "/api/tags", "/api/ps", "/api/show", "/api/version"}
    assert set(document["paths"]) == paths | {"/tokenize", "/detokenize", "/tokenizer_info", "/health", "/metrics"}


@pytest.mark.slow
def test_schemathesis_finds_no_request_that_the_document_does_not_cover(served):
    """Random requests by the OpenAPI document, valid and not: statuses, types and bodies are as it says."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st
    from schemathesis.checks import positive_data_acceptance

    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    for operation in schema.get_all_operations():
        operation = operation.ok()
        cases = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode))

        @given(cases)
        @settings(
            max_examples=40,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def run(case):
            # Some fields are in the document so that they can be refused by name; a prompt may be too long.
            case.call_and_validate(excluded_checks=[positive_data_acceptance])

        run()
