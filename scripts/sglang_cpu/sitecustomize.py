"""Lets torchvision be imported beside a build of torch that it was not compiled for.

SGLang imports torchvision for image models. Its Python side describes two compiled operators, which a wheel built for another
torch cannot load; to declare them first is all that a text model needs.
"""

import importlib.abc
import sys


class _DeclareOperators(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            # kept alive here: a library that is collected takes its operators with it
            torch._miles_sc_torchvision = library = torch.library.Library("torchvision", "DEF")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _DeclareOperators())
