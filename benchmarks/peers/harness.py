# SPDX-License-Identifier: Apache-2.0
"""What every rival's script shares: the decoder with its random weights, the work, the clock and the comparison.

A script is run with --spec FILE --out FILE. The spec says shape, device, workloads and runs; into the other file the script
writes what it measured, anew after each workload, so that a run that is killed keeps what it had.
"""
import argparse
import contextlib
import gc
import importlib.metadata
import json
import os
import statistics
import time
from pathlib import Path

import torch
from torch import nn
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from shapes import Workload, block_bytes

LEARNING_RATE = 0.0  # the same work, and weights that stay those of the reference
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Decode(nn.Module):
    """Passes without gradients: (B,T,C) hidden states, or (B,T) tokens with a KV cache, through layers and final norm."""

    def __init__(self, language_model):
        super().__init__()
        self.lm = language_model

    def forward(self, x, cache=None):
        if cache is None:
            return self.lm.model(inputs_embeds=x, use_cache=False).last_hidden_state  # (B,T,C)
        return self.lm(input_ids=x, past_key_values=cache, use_cache=True, logits_to_keep=1).logits  # (B,1,V)


class Loss(nn.Module):
    """The loss of a training step; without labels there is no head, and a mean square stands for the loss."""

    def __init__(self, language_model):
        super().__init__()
        self.lm = language_model

    def forward(self, hidden, labels=None):
        if labels is not None:
            return self.lm(inputs_embeds=hidden, labels=labels, use_cache=False).loss
        return self.lm.model(inputs_embeds=hidden, use_cache=False).last_hidden_state.float().square().mean()


class Session:
    """One process of one rival. Its result is in `self.result`, and in the --out file after each workload."""

    def __init__(self, *distributions):
        parser = argparse.ArgumentParser()
        parser.add_argument("--spec", type=Path, required=True)
        parser.add_argument("--out", type=Path, required=True)
        arguments = parser.parse_args()
        self.spec = json.loads(arguments.spec.read_text())
        self.out = arguments.out
        self.shape = self.spec["shape"]
        name = self.spec["device"]
        self.device = torch.device("cuda:0" if name == "cuda" else name)
        self.workloads = [Workload(name) for name in self.spec["workloads"]]
        self.references = {}
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", *distributions)}
        self.result = {"versions": versions, "cells": {}, "not_run": {}, "link_GB_per_s": []}
        if self.device.type == "cuda":
            self.result["machine"] = torch.cuda.get_device_name(self.device)
        torch.manual_seed(0)

    def save(self):
        partial = self.out.with_suffix(".partial")
        partial.write_text(json.dumps(self.result, indent=1))
        os.replace(partial, self.out)

    def skip(self, workload, reason):
        self.result["not_run"][workload.name] = reason
        self.save()

    def probe_link(self):
        """GB/s of copies out of page-locked memory; of copies within host memory on the CPU."""
        size = 256 << 20 if self.device.type == "cuda" else 16 << 20
        source = torch.ones(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        target = torch.empty(size, dtype=torch.uint8, device=self.device)
        rates = []
        for _ in range(8):
            seconds = self.seconds_of(lambda: target.copy_(source, non_blocking=True))
            rates.append(size / seconds / 1e9)
        self.result["link_GB_per_s"].append(statistics.median(rates))

    # ---- model and inputs

    def build(self, vocabulary=None):
        """All weights in bf16 on the device, random and the same in each process of one machine."""
        s = self.shape
        config = Qwen3Config(
            hidden_size=s["hidden"], intermediate_size=s["inner"], num_hidden_layers=s["layers"], num_attention_heads=s["heads"],
            num_key_value_heads=s["kv_heads"], head_dim=s["head_dim"], vocab_size=vocabulary or s["vocabulary"],
            tie_word_embeddings=False, max_position_embeddings=40960, bos_token_id=0, eos_token_id=1, pad_token_id=1)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with self.device:
                model = Qwen3ForCausalLM(config)
        finally:
            torch.set_default_dtype(torch.float32)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        return model.eval()

    def hidden(self, workload):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(workload.batch, workload.tokens, self.shape["hidden"], generator=generator)
        return x.to(self.device, torch.bfloat16)  # (B,T,C)

    def labels(self, workload, vocabulary=None):
        generator = torch.Generator().manual_seed(2)
        sizes = (workload.batch, workload.tokens)
        return torch.randint(vocabulary or self.shape["vocabulary"], sizes, generator=generator).to(self.device)  # (B,T)

    # ---- time and memory

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds_of(self, work):
        self.synchronize()
        begin = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - begin

    def release(self):
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- the run

    @contextlib.contextmanager
    def guarded(self, workload):
        """A workload that fails is written down and the next one goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001: whatever a rival throws belongs into the table
            self.result["cells"].pop(workload.name, None)
            self.skip(workload, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300])
            self.release()

    def refer(self, run, trains=None):
        """Keeps what run(workload) gives with all weights on the device."""
        for workload in self.workloads:
            if trains is None or workload.trains == trains:
                with self.guarded(workload):
                    self.references[workload.name] = run(workload)
        self.release()

    def measure(self, run, trains=None, against="a resident run of the same weights", notes=None, streamed=True):
        """Compares the first run of each workload with its reference, then times the others; fewer where they take long.

        @param notes  by kind of workload, for the table."""
        notes = notes or {}
        for workload in self.workloads:
            if workload.name not in self.references or (trains is not None and workload.trains != trains):
                continue
            with self.guarded(workload):
                self.release()
                self.probe_link()
                begin = time.perf_counter()
                check = dict(difference(run(workload), self.references[workload.name]), against=against)
                slow = time.perf_counter() - begin > self.spec["patience"]
                for _ in range(0 if slow else self.spec["warmup"]):
                    run(workload, results=False)
                if self.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(self.device)
                seconds = []
                while len(seconds) < self.spec["runs"] and (not seconds or sum(seconds) < self.spec["patience"]):
                    seconds.append(self.seconds_of(lambda: run(workload, results=False)))
                cell = {"seconds": seconds, "check": check, "link_GB_per_s": self.result["link_GB_per_s"][-1], "note": notes.get(workload.kind, ""),
                        "streamed": streamed}
                if self.device.type == "cuda":
                    cell["peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
                self.result["cells"][workload.name] = [cell]
                self.save()
        self.save()

    @property
    def streamed_bytes(self):
        return block_bytes(self.shape) * self.shape["layers"]


def difference(results, references):
    """The largest difference of a tensor, as it is and relative to the largest value that the tensor should have."""
    worst = {"max_relative_difference": 0.0, "max_difference": 0.0, "finite": True, "tensors": len(references)}
    for result, reference in zip(results, references, strict=True):
        result, reference = result.float(), reference.float()
        if not reference.isfinite().all():
            raise ValueError("the reference is not finite: the comparison proves nothing")
        if not result.isfinite().all():
            return dict(worst, finite=False)
        distance = (result - reference).abs().max().item()
        relative = distance / max(reference.abs().max().item(), 1e-30)
        if relative > worst["max_relative_difference"]:
            worst.update(max_relative_difference=relative, max_difference=distance)
    return worst


class Inference:
    """forward and decode workloads of a Decode module, however its weights arrive."""

    def __init__(self, session, module):
        self.session, self.module, self.state = session, module, {}

    @torch.no_grad()
    def __call__(self, workload, results=True):
        if workload.kind == "forward":
            if workload.name not in self.state:
                self.state = {workload.name: self.session.hidden(workload)}
            output = self.module(self.state[workload.name])
        else:
            output = self._next_token(workload, begin=results)
        return [output.cpu()] if results else None

    def _next_token(self, workload, begin):
        if begin:
            cache = DynamicCache()
            token = self.module(self.session.labels(workload), cache).argmax(-1)  # (B,1)
            self.state = {workload.name: (token, cache)}
        token, cache = self.state[workload.name]
        logits = self.module(token, cache)
        self.state[workload.name] = (logits.argmax(-1), cache)
        self.state[workload.name][0].cpu()  # a program looks at each token before the next
        return logits


class Training:
    """Steps of a Loss module. The comparison takes the loss and all gradients."""

    def __init__(self, session, module, optimizer):
        self.session, self.module, self.optimizer, self.state = session, module, optimizer, {}

    def parameters(self):
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def inputs(self, workload):
        if workload.name not in self.state:
            labels = self.session.labels(workload) if workload.kind == "lora_step" else None
            self.state = {workload.name: (self.session.hidden(workload), labels)}
        return self.state[workload.name]

    def __call__(self, workload, results=True):
        loss = self.module(*self.inputs(workload))
        loss.backward()
        found = None
        if results:
            gradients = (p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in self.parameters())
            found = [loss.detach().cpu(), *(g.detach().cpu() for g in gradients)]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return found


def add_lora(session, language_model, checkpointing=True):
    """peft's adapters of rank 16 on all linear maps of the layers; B is not zero, or A would get no gradient."""
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS), language_model)
    with torch.no_grad():
        for name, parameter in language_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
    if checkpointing:
        language_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return [p for p in language_model.train().parameters() if p.requires_grad]
