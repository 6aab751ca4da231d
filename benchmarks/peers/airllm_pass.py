# SPDX-License-Identifier: Apache-2.0
"""AirLLM: each layer from a file of its own, through the page cache, for one pass. A small vocabulary, so that the ends weigh little."""
import shutil
import tempfile
from pathlib import Path

import torch
from airllm import AutoModel
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from harness import Session

VOCABULARY = 1024


class Pass:
    def __init__(self, session, model):
        self.session, self.model = session, model

    @torch.no_grad()
    def __call__(self, workload, results=True):
        logits = self.model(input_ids=self.session.labels(workload, VOCABULARY), use_cache=False).logits
        return [logits.cpu()] if results else None


def write_checkpoint(model, folder):
    model.save_pretrained(folder, max_shard_size="4GB")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1").save_pretrained(folder)


def main():
    session = Session("airllm")
    for workload in session.workloads:
        if workload.kind != "forward":
            session.skip(workload, "only its forward pass is compared")
    session.workloads = [workload for workload in session.workloads if workload.kind == "forward"]
    folder = Path(tempfile.mkdtemp(prefix="airllm-", dir=session.spec["scratch"]))
    try:
        model = session.build(VOCABULARY)
        session.refer(Pass(session, model))
        write_checkpoint(model, folder)
        del model
        session.release()
        streamed = AutoModel.from_pretrained(str(folder), device=str(session.device))
        session.measure(Pass(session, streamed), notes={"forward": "from files, page cache warm"})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
