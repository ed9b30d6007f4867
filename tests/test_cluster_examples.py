"""The files of examples/cluster: a manifest by Kubernetes' schemas, Ray's by our options, commands by our parser."""

import json
import re
import shlex
from pathlib import Path

import jsonschema_rs
import yaml

from ppsd_rt.cli.parser import parse
from ppsd_rt.extras import is_there

FOLDER = Path(__file__).parent.parent / "examples/cluster"
SCHEMA = json.loads((Path(__file__).parent / "kubernetes_schema.json").read_text())
KINDS = {"Deployment": "io.k8s.api.apps.v1.Deployment", "Service": "io.k8s.api.core.v1.Service"}


def objects():
    return list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))


def check(thing):
    schema = {"$ref": f"#/definitions/{KINDS[thing['kind']]}", "definitions": SCHEMA["definitions"]}
    jsonschema_rs.validate(schema, thing)


def test_the_manifest_is_one_by_kubernetes_schemas():
    found = objects()
    assert sorted(thing["kind"] for thing in found) == ["Deployment", "Deployment", "Service", "Service"]
    for thing in found:
        check(thing)


def test_what_the_manifest_names_fits_together():
    server, http, engines, engine = objects()
    for service, port in ((http, "http"), (engines, "engines")):
        assert service["spec"]["selector"] == server["spec"]["template"]["metadata"]["labels"]
        names = {one["name"] for one in server["spec"]["template"]["spec"]["containers"][0]["ports"]}
        assert {one["targetPort"] for one in service["spec"]["ports"]} == {port} <= names
    for deployment in (server, engine):
        assert deployment["spec"]["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        args = parse(container["args"][1:])
        if args.command == "engine":
            assert args.front == (engines["metadata"]["name"], engines["spec"]["ports"][0]["port"])
        else:
            assert args.engines[1] == engines["spec"]["ports"][0]["port"]


def test_the_laptops_commands_are_ours():
    text = (FOLDER / "two_laptops.sh").read_text().replace("\\\n", " ")
    commands = re.findall(r"-m ppsd_rt ([^&\n]*)", text)
    assert len(commands) == 2
    fronts = [parse(shlex.split(re.sub(r"\$\{?\w+(:-\w+)?\}?", "x", command))) for command in commands]
    assert (fronts[0].engines, fronts[1].front) == (("0.0.0.0", 7000), ("x", 7000))


def test_rays_file_has_options_of_ours():
    (application,) = yaml.safe_load((FOLDER / "ray.yaml").read_text())["applications"]
    assert application["import_path"] == "ppsd_rt.ray:app"
    if is_there("ray"):
        from ppsd_rt.ray import Options

        Options(**application["args"])
    else:
        source = (FOLDER.parents[1] / "ppsd_rt/ray.py").read_text()
        assert all(re.search(rf"^    {name}: ", source, re.M) for name in application["args"])
