# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed ZeRO-3 on one rank with parameters in page-locked host memory, PyTorch's AdamW: no extension is compiled."""
import os

import torch

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
import deepspeed  # noqa: E402: reads the environment
from deepspeed.utils import safe_get_full_grad  # noqa: E402

from harness import LEARNING_RATE, Decode, Inference, Loss, Session, Training, add_lora  # noqa: E402
from shapes import block_bytes  # noqa: E402


def config_of(session):
    """Prefetches about one block ahead and keeps none, like the others here; tiny tensors stay on the device."""
    block = block_bytes(session.shape) // 2  # in numbers
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "stage3_max_live_parameters": 3 * block,
            "stage3_prefetch_bucket_size": 2 * block,
            "stage3_param_persistence_threshold": 100000,
            "stage3_max_reuse_distance": 0,
        },
    }


class Engine:
    """Steps through the engine, which owns gradients and optimizer."""

    def __init__(self, session, engine, parameters):
        self.session, self.engine, self.parameters = session, engine, parameters
        self.inputs = Training(session, None, None).inputs

    def __call__(self, workload, results=True):
        loss = self.engine(*self.inputs(workload))
        self.engine.backward(loss)
        found = None
        if results:
            found = [loss.detach().cpu(), *(safe_get_full_grad(p).cpu() for p in self.parameters)]
        self.engine.step()
        return found


def main():
    session = Session("deepspeed", "peft")
    torch.cuda.set_device(session.device)
    deepspeed.init_distributed("nccl")
    model = session.build()
    if session.workloads[0].trains:
        parameters = add_lora(session, model)
        module = Loss(model)
        session.refer(Training(session, module, torch.optim.AdamW(parameters, lr=LEARNING_RATE)))
        config = dict(config_of(session), optimizer={"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True}})
        config["zero_allow_untested_optimizer"] = True
        engine = deepspeed.initialize(model=module, model_parameters=parameters, config=config)[0]
        session.release()
        session.measure(Engine(session, engine, parameters), notes={"lora_step": "the head moves too"})
    else:
        inference = Inference(session, Decode(model))
        session.refer(inference)
        engine = deepspeed.initialize(model=inference.module, config=config_of(session))[0]
        engine.module.eval()
        session.release()
        session.measure(Inference(session, engine.module), notes={"decode": "head and embedding move too"})


if __name__ == "__main__":
    main()
