#!/usr/bin/env bash
# transformers 5.24.0: `transformers serve` puts a blank between the text parts of a message.
#
# Expected: a message whose content is a list of text parts is the text of the parts, one behind the
#   other. Clients that cut a text at a length, or wrap a quotation, rely on that.
# Seen: the server joins the parts of a text model's message with " ". "un" and "do" become "un do",
#   and a part that ends in a newline is followed by a blank, which begins the next line. So the
#   same text in one part and in two gives other token ids, and shares no prefix behind the joint.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 \
    fastapi==0.165.0 uvicorn==0.54.0 openai==3.57.0
"$place/venv/bin/python" - <<'EOF'
from transformers.cli.serving.utils import BaseHandler, Modality


def shown(*texts):
    parts = [{"type": "text", "text": text} for text in texts]
    messages = [{"role": "user", "content": parts}]
    [message] = BaseHandler.get_processor_inputs_from_messages(messages, Modality.LLM)
    print(texts, "->", repr(message["content"]))
    return message["content"]


assert shown("undo") == "undo"
assert shown("un", "do") == "un do"
assert shown("def f():\n", "    return 1\n") == "def f():\n     return 1\n"
EOF
