# SPDX-License-Identifier: Apache-2.0
"""transformers with all weights on the device, peft's LoRA with gradient checkpointing: what nothing is streamed costs."""
import torch

from harness import LEARNING_RATE, Decode, Inference, Loss, Session, Training, add_lora


def main():
    session = Session("peft")
    model = session.build()
    inference = Inference(session, Decode(model))
    session.refer(inference, trains=False)
    session.measure(inference, trains=False, against="a second run", streamed=False)
    if any(workload.trains for workload in session.workloads):
        parameters = add_lora(session, model)
        training = Training(session, Loss(model), torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=session.device.type == "cuda"))
        session.refer(training, trains=True)
        session.measure(training, trains=True, against="a second run", streamed=False)


if __name__ == "__main__":
    main()
