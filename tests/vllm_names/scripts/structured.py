"""Answers of a form: a choice, an expression, a schema, a class."""

import json
import sys
from enum import Enum

from pydantic import BaseModel, ConfigDict
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams


class Kind(Enum):
    SEDAN = "sedan"
    TRUCK = "truck"


class Car(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Kind
    electric: bool


llm = LLM(model=sys.argv[1], max_model_len=256)
choice = StructuredOutputsParams(choice=["Positive", "Negative"])
params = SamplingParams(structured_outputs=choice, temperature=0)
text = llm.generate(prompts="Classify: good!", sampling_params=params)[0].outputs[0].text
assert text in ("Positive", "Negative")
mail = SamplingParams(
    structured_outputs=StructuredOutputsParams(regex=r"\w{2,8}@\w{2,8}\.com\n"),
    stop=["\n"],
    max_tokens=50,
)
address = llm.generate("An address:", mail)[0].outputs[0].text
assert "@" in address and address.endswith(".com")
schema = Car.model_json_schema()
params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema), max_tokens=100)
car = Car.model_validate_json(llm.generate("A car:", params)[0].outputs[0].text)
numbers = {"type": "array", "maxItems": 2, "items": {"enum": [1, 2]}}
params.structured_outputs = StructuredOutputsParams(json=json.dumps(numbers))
found = json.loads(llm.generate("Numbers:", params)[0].outputs[0].text)
print(text, address, car, found)
