"""docs/launch/skypilot.yaml by SkyPilot's own schema; `.ci/skypilot` starts it by hand.

The names of the fields are those that skypilot.json has; with --record they are written there.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import jsonschema
import pytest
import yaml
from sky.utils import schemas

HERE = Path(__file__).parent
task = yaml.safe_load((HERE.parents[1] / "docs" / "launch" / "skypilot.yaml").read_text())
task_schema, resources_schema = schemas.get_task_schema(), schemas.get_resources_schema()
recovery = resources_schema["properties"]["job_recovery"]["anyOf"][1]
names = {
    "skypilot": version("skypilot"),
    "task": sorted(task_schema["properties"]),
    "resources": sorted(resources_schema["properties"]),
    "job_recovery": sorted(recovery["properties"]),
}
recorded = HERE / "skypilot.json"
if "--record" in sys.argv:
    recorded.write_text(f"{json.dumps(names, indent=1)}\n")
assert json.loads(recorded.read_text()) == names, f"not what {recorded} has: {names}"
jsonschema.validate(task, task_schema)
jsonschema.validate(task["resources"], resources_schema)
task["resources"]["job_recovery"]["recover_on_exit_codes"] = [256]  # is refused
with pytest.raises(jsonschema.ValidationError, match="256"):
    jsonschema.validate(task["resources"], resources_schema)
print(f"skypilot {names['skypilot']}: its schema allows docs/launch/skypilot.yaml")
