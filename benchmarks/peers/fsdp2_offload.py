# SPDX-License-Identifier: Apache-2.0
"""FSDP2 on one rank with CPUOffloadPolicy: each layer a group in page-locked host memory. Ends resident and left alone."""
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from harness import LEARNING_RATE, Decode, Inference, Loss, Session, Training, add_lora


def shard(session, module):
    """Layers go to host memory; embedding, final norm and head belong to no group and stay where they are."""
    language_model = module.lm
    policy = CPUOffloadPolicy(pin_memory=True)
    for layer in language_model.model.layers:
        fully_shard(layer, offload_policy=policy, reshard_after_forward=True)
    ends = (language_model.model.embed_tokens, language_model.model.norm, language_model.lm_head)
    ignored = {parameter for end in ends for parameter in end.parameters()}
    fully_shard(module, offload_policy=policy, reshard_after_forward=True, ignored_params=ignored)
    session.release()


def main():
    session = Session("peft")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    torch.cuda.set_device(session.device)
    dist.init_process_group("cuda:nccl,cpu:gloo", store=store, rank=0, world_size=1)
    model = session.build()
    if session.workloads[0].trains:
        module = Loss(model)
        resident = Training(session, module, torch.optim.AdamW(add_lora(session, model), lr=LEARNING_RATE))
        session.refer(resident)
        shard(session, module)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
        session.measure(Training(session, module, optimizer))
    else:
        module = Decode(model)
        inference = Inference(session, module)
        session.refer(inference)
        shard(session, module)
        session.measure(inference)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
