"""Small quantised checkpoints: the embedded models made smaller, or of another architecture."""

import json
from dataclasses import replace

from safetensors.torch import save_file

import reconcile
from reconcile import registry


def write(folder, config, tensors):
    """A checkpoint directory."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors")
    return folder


def first_layer(config, tensors, sizes=None):
    """The first layer alone; ``sizes`` of its MLP's intermediate features."""
    kept = {n: t for n, t in tensors.items() if ".layers." not in n or ".layers.0." in n}
    config = config | {"num_hidden_layers": 1}
    if sizes is not None:
        config |= {"intermediate_size": sizes}
        for name, tensor in kept.items():
            if "down_proj" in name:
                kept[name] = tensor[:, :sizes]
            elif ".mlp." in name:
                kept[name] = tensor[:sizes]
    return config, kept


def mxfp8_case(folder, prompts=((5, 17, 230, 99, 4, 61, 7, 8), (200, 3)), **candidate):
    """The case of an MXFP8 kernel on a checkpoint, gate included."""
    case = reconcile.load_case(registry.case_file("tiny-mxfp8"))
    file = folder.parent / "prompts.json"
    file.write_text(json.dumps([list(ids) for ids in prompts]))
    model = replace(case.model, checkpoint=folder, original=None, prompts=file)
    return replace(case, model=model).with_candidate(**{"modules": ("*",)} | candidate)
