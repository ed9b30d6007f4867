"""Several devices where there is but the CPU's memory: which tensor belongs to which, and who reads it.

Every tensor of a model's stages is registered with the device that it stands for; a kernel that is launched on a device
may be given that one's tensors only. Their memory is disjoint, so what is not copied is not there.
"""

import threading
from contextlib import contextmanager
from dataclasses import fields, is_dataclass

import torch
from triton.runtime import interpreter

from ppsd_rt.cuda import devices
from ppsd_rt.cuda.stages import DeviceStages

CPUS = [torch.device("cpu", number) for number in range(3)]


def storages(thing):
    """Addresses of the memory of all tensors in a thing."""
    if isinstance(thing, torch.Tensor):
        return {thing.untyped_storage().data_ptr()} if thing.numel() else set()
    if isinstance(thing, dict):
        thing = list(thing.values())
    elif is_dataclass(thing):
        thing = [getattr(thing, field.name) for field in fields(thing)]
    if isinstance(thing, (list, tuple)):
        return set().union(*map(storages, thing)) if thing else set()
    return storages(vars(thing)) if hasattr(thing, "__dict__") and not isinstance(thing, type) else set()


class DeviceGuard:
    """Watches every launch from `install` on."""

    def __init__(self):
        self.current, self.owners, self.launches = threading.local(), {}, {}

    def install(self):
        launch, made = interpreter.GridExecutor.__call__, DeviceStages.__init__

        def guarded(executor, *arguments, **options):
            self.check(executor.fn.__name__, arguments)
            return launch(executor, *arguments, **options)

        def registered(stages, *arguments, **options):
            made(stages, *arguments, **options)
            self.register(stages)

        def listed(stages, leg):
            copies = copied(stages, leg)
            for copy in copies:
                self.check_copy(copy)
            return copies

        copied = DeviceStages.copies
        interpreter.GridExecutor.__call__, DeviceStages.__init__, DeviceStages.copies = guarded, registered, listed
        before, devices.on = devices.on, self.on

        def uninstall():
            interpreter.GridExecutor.__call__, DeviceStages.__init__, DeviceStages.copies = launch, made, copied
            devices.on = before

        return uninstall

    @contextmanager
    def on(self, device):
        before, self.current.device = getattr(self.current, "device", None), device
        try:
            yield
        finally:
            self.current.device = before

    def register(self, stages):
        """The newest stages only: memory that is given back may be another device's next."""
        weights, self.owners = stages.weights, {}
        first, last = stages.home, stages._devices[-1]
        self._own(first, [weights.embedding, weights.head, stages._draft])
        if first != last:  # an LM head may be the embedding on one device
            self._own(last, [weights.norm, weights.lm_head])
        for device, layer in zip(weights.places or [first] * len(weights.layers), weights.layers, strict=True):
            self._own(device, layer)
        for device, site in stages._sites.items():
            self._own(device, site)
        for device, work in zip(stages._devices, stages._late, strict=True):
            self._own(device, work)

    def _own(self, device, thing):
        for place in storages(thing):
            assert self.owners.setdefault(place, device) == device, "two devices share memory"

    def check_copy(self, copy):
        assert copy.to_device != copy.from_device, "nothing is copied within a device"
        for tensor, device in ((copy.to, copy.to_device), (copy.source, copy.from_device)):
            assert {self.owners[place] for place in storages(tensor)} == {device}, "a copy that names another device"

    def check(self, kernel, arguments):
        current = getattr(self.current, "device", None)
        for place in storages([a for a in arguments if isinstance(a, torch.Tensor)]):
            owner = self.owners.get(place, current)
            assert owner == current, f"{kernel} runs on {current} and is given memory of {owner}"
        self.launches[current] = self.launches.get(current, 0) + 1
