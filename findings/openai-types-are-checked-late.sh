#!/usr/bin/env bash
# openai 3.57.0 and pydantic 2.14.4: a request validated by OpenAI's own types is not validated.
#
# Expected: TypeAdapter(CompletionCreateParamsNonStreaming).validate_python(body) refuses a body
#   whose messages are a string, numbers, or have no known role, and gives back one that can be used.
# Seen: it accepts them all. The types say Iterable, for which pydantic returns an iterator that
#   checks each item when it is read. So the error comes later, from the code that reads; a good
#   body can be read once, is empty the second time, and is no JSON any more.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q openai==3.57.0 pydantic==2.14.4
"$place/venv/bin/python" - <<'EOF'
import json

from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from pydantic import TypeAdapter, ValidationError

schema = TypeAdapter(CompletionCreateParamsNonStreaming)
for messages in ("Hello", [5, 6], [{"role": "nobody"}], [{"role": "user", "content": 5}]):
    body = schema.validate_python({"model": "m", "messages": messages})
    try:
        list(body["messages"])
    except ValidationError as error:
        print(f"{messages!r}: accepted, and {error.error_count()} errors when it is read")
    else:
        raise SystemExit(f"{messages!r} is refused nowhere")

good = schema.validate_python({"model": "m", "messages": [{"role": "user", "content": "Hello"}]})
lengths = [len(list(good["messages"])) for _ in range(2)]
print("a good one, read twice:", lengths, type(good["messages"]).__name__)
assert lengths == [1, 0]
try:
    json.dumps(good)
except TypeError as error:
    print(error)
else:
    raise SystemExit("it is JSON")
EOF
