"""Whether objects of Kubernetes have only fields that exist, of the right types, and all that are required.

python -m kubernetes_fields FOLDER

That is what ``kubectl apply --dry-run=client`` would say, from Kubernetes' own schemas. They are 8 MB for one version,
so ``kubernetes_fields.json`` has the fields that the pages use, and no others. For a new one, make the file again:
FOLDER is ``kubernetes-json-schema/v1.37.0-local-strict`` of PyPI's kubernetes-validate (21 MB), installed elsewhere.
"""

import json
import re
import sys
from pathlib import Path

import yaml

STORED = Path(__file__).with_suffix(".json")
DOCS = Path(__file__).parents[2] / "docs"
TYPES = {"string": str, "integer": int, "boolean": bool, "number": (int, float)}


def objects_of(page):
    """The objects in the YAML of a page."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    return [
        found for block in blocks for found in yaml.safe_load_all(block) if isinstance(found, dict) and "kind" in found
    ]


def job_sets_of(page):
    """The JobSets in the YAML files of a page. JobSet is not part of Kubernetes; the specs of its Jobs are."""
    blocks = re.findall(r'^```yaml title="[^"]*"\n(.*?)^```', (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    return [found for block in blocks for found in yaml.safe_load_all(block) if found["kind"] == "JobSet"]


def title_of(found):
    return f"{found['apiVersion']} {found['kind']}"


def problems(value, form, where=""):
    """What is wrong with a value: ``form`` is a type, a list of types, or a dict that says what is inside."""
    if not isinstance(form, dict):
        names = [form] if isinstance(form, str) else form
        fits = any(isinstance(value, TYPES[name]) and (name == "boolean") == isinstance(value, bool) for name in names)
        return [] if fits else [f"{where} is {value!r}, expected {' or '.join(names)}"]
    if "items" in form:
        if not isinstance(value, list):
            return [f"{where} is {value!r}, expected a list"]
        return [said for i, one in enumerate(value) for said in problems(one, form["items"], f"{where}[{i}]")]
    if not isinstance(value, dict):
        return [f"{where} is {value!r}, expected fields"]
    if "values" in form:
        return [said for key, one in value.items() for said in problems(one, form["values"], f"{where}.{key}")]
    missing = [f"{where} has no {name}, which is required" for name in form["required"] if name not in value]
    unknown = [f"{where} has an unknown field {key}" for key in value if key not in form["fields"]]
    known = {key: one for key, one in value.items() if key in form["fields"]}
    return missing + unknown + [s for k, one in known.items() for s in problems(one, form["fields"][k], f"{where}.{k}")]


def kind_of(schema):
    return schema["type"] if isinstance(schema["type"], str) else next(t for t in schema["type"] if t != "null")


def used(schema, definitions, values):
    """The part of a JSON schema that these values use, as a form of `problems`."""
    while "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if options := schema.get("oneOf"):
        return [kind_of(one) for one in options]
    kind = kind_of(schema)
    if kind == "array":
        return {"items": used(schema["items"], definitions, [one for value in values for one in value])}
    if kind != "object":
        return kind
    if "properties" not in schema:
        return {
            "values": used(schema["additionalProperties"], definitions, [v for one in values for v in one.values()])
        }
    fields = dict.fromkeys(key for value in values for key in value)
    if unknown := fields.keys() - schema["properties"]:
        sys.exit(f"There is no field {', '.join(unknown)}")
    of = {key: [value[key] for value in values if key in value] for key in fields}
    return {
        "required": sorted(schema.get("required", [])),
        "fields": {key: used(schema["properties"][key], definitions, of[key]) for key in sorted(fields)},
    }


def main(folder):
    definitions = json.loads((Path(folder) / "_definitions.json").read_text())["$defs"]
    kinds = {
        f"{'/'.join(filter(None, (one['group'], one['version'])))} {one['kind']}": schema
        for schema in definitions.values()
        for one in schema.get("x-kubernetes-group-version-kind", ())
    }
    found = {}
    for page in DOCS.rglob("*.md"):
        for one in objects_of(page):
            found.setdefault(title_of(one), []).append(one)
        for job_set in job_sets_of(page):
            jobs = [one["template"] for one in job_set["spec"]["replicatedJobs"]]
            found.setdefault("batch/v1 Job", []).extend({"spec": job["spec"]} for job in jobs)
    forms = {title: used(kinds[title], definitions, ones) for title, ones in sorted(found.items())}
    STORED.write_text(json.dumps(forms, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
