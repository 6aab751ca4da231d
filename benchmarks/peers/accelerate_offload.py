# SPDX-License-Identifier: Apache-2.0
"""Accelerate's cpu_offload: hooks copy each module's weights to the device before it runs. Ends resident, layers streamed."""
from accelerate import cpu_offload

from harness import Decode, Inference, Session


def main():
    session = Session("accelerate")
    model = session.build()
    inference = Inference(session, Decode(model))
    session.refer(inference, trains=False)
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = cpu_offload(layer.cpu(), execution_device=session.device)
    session.measure(inference, trains=False)
    for workload in session.workloads:
        if workload.trains:
            session.skip(workload, "its hooks free the weights after the forward: a backward finds none")


if __name__ == "__main__":
    main()
