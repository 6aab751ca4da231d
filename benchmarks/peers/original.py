# SPDX-License-Identifier: Apache-2.0
"""The Python block-streamer: its StreamedModel over transformers' layers, its own LoRA layers, AdamW on the host. Ends resident."""
import torch
from block_streamer.lora import LoRAConfig, apply_to_blocks, freeze_base
from streamer import StreamedModel
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness import LEARNING_RATE, TARGETS, Session, Training


class Pass(nn.Module):
    """Hidden states through the layers, which `run` walks over, and the final norm."""

    def __init__(self, session, model, run):
        super().__init__()
        self.model, self.run, self.device = model, run, session.device

    def forward(self, hidden):
        positions = torch.arange(hidden.shape[1], device=self.device).unsqueeze(0).expand(hidden.shape[0], -1)
        rotary = self.model.model.rotary_emb(hidden, positions)
        output = self.run(hidden, position_embeddings=rotary, attention_mask=None, position_ids=positions)
        return self.model.model.norm(output[0] if isinstance(output, tuple) else output)  # (B,T,C)


class StepLoss(nn.Module):
    def __init__(self, decoder, model):
        super().__init__()
        self.decoder, self.model = decoder, model

    def forward(self, hidden, labels=None):
        output = self.decoder(hidden)
        if labels is None:
            return output.float().square().mean()
        logits = self.model.lm_head(output[:, :-1]).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


class Walk:
    """All layers resident; with gradients each is computed again in the backward, as a streamed one is."""

    def __init__(self, layers):
        self.layers = layers

    def __call__(self, hidden, **arguments):
        for layer in self.layers:
            if torch.is_grad_enabled():
                hidden = checkpoint(layer, hidden, use_reentrant=False, **arguments)
            else:
                hidden = layer(hidden, **arguments)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return hidden


class Forward:
    def __init__(self, session, decoder):
        self.session, self.decoder, self.state = session, decoder, {}

    @torch.no_grad()
    def __call__(self, workload, results=True):
        if workload.name not in self.state:
            self.state = {workload.name: self.session.hidden(workload)}
        output = self.decoder(self.state[workload.name])
        return [output.cpu()] if results else None


def with_its_lora(session, layers):
    """Its adapters on all linear maps. It leaves the base weights to its shards, so they are put back here."""
    for layer in layers:
        kept = layer.state_dict()
        apply_to_blocks(nn.ModuleList([layer]), LoRAConfig(rank=16, alpha=32.0, targets=tuple(TARGETS), top_fraction=1.0))
        layer.load_state_dict(kept, strict=False)
    layers.to(session.device)
    freeze_base(layers)
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)


def main():
    session = Session("block-streamer")
    training = any(workload.trains for workload in session.workloads)
    for workload in session.workloads:
        if workload.kind == "decode":
            session.skip(workload, "it has no KV cache")
    model = session.build()
    layers = model.model.layers
    kind = dict(device=str(session.device), prefetch_ahead=1, dtype=torch.bfloat16)
    if not training:
        wanted = [workload for workload in session.workloads if workload.kind == "forward"]
        session.workloads = wanted
        session.refer(Forward(session, Pass(session, model, Walk(layers))))
        session.measure(Forward(session, Pass(session, model, StreamedModel(layers, **kind))))
        return
    with_its_lora(session, layers)
    parameters = [p for p in layers.parameters() if p.requires_grad]
    resident = Pass(session, model, Walk(layers))
    session.refer(Training(session, StepLoss(resident, model), torch.optim.AdamW(parameters, lr=LEARNING_RATE)))
    streamed = StreamedModel(layers, **kind).train()
    parameters = [p for p in streamed.parameters() if p.requires_grad]
    loss = StepLoss(Pass(session, model, streamed), model)
    session.measure(Training(session, loss, torch.optim.AdamW(parameters, lr=LEARNING_RATE)))


if __name__ == "__main__":
    main()
