"""What a method learned about one model: made once, saved, shared on the hub, loaded by name.

from hf_kvret.artifacts import CalibrationArtifact

artifact = CalibrationArtifact.from_pretrained("user/name-on-the-hub", method="a2ats")
artifact.check(model.config)
artifact.check_weights(model)
"""

from hf_kvret.artifacts.artifact import CalibrationArtifact
from hf_kvret.artifacts.identity import ModelIdentity, WeightSample

__all__ = ["CalibrationArtifact", "ModelIdentity", "WeightSample"]
