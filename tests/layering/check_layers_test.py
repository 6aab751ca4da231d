#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Each rule of check_layers.py must find the one thing that breaks it in an otherwise clean tree."""

import pathlib
import tempfile
import unittest

import check_layers

HEAD = "// SPDX-License-Identifier: Apache-2.0\n#pragma once\n\n"
CLEAN = {
    "core/ids.hpp": HEAD + "#include <cstdint>\n",
    "storage/tier.hpp": HEAD + "#include <block_streamer/core/ids.hpp>\n\n#include <boost/asio/post.hpp>\n",
    "block/weights.hpp": HEAD + "#include <ATen/core/Tensor.h>\n",
}


def findings(changes):
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, text in {**CLEAN, **changes}.items():
            path = root / "include" / "block_streamer" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (root / "cmake").mkdir()
        checker = check_layers.Checker(root)
        (root / "cmake" / "headers.cmake").write_text(checker.render_lists())
        for header in checker.headers:
            checker.check_header(header)
        checker.check_cycles()
        checker.check_lists()
        checker.check_tree()
        return checker.findings


class CheckLayers(unittest.TestCase):
    def finds(self, text, **changes):
        found = findings({name.replace("__", "/") + ".hpp": body for name, body in changes.items()})
        self.assertTrue(any(text in line for line in found), f"{text!r} not in {found}")

    def test_clean_tree_has_no_finding(self):
        self.assertEqual(findings({}), [])

    def test_higher_rank(self):
        self.finds("rank 0 includes", core__ids=HEAD + "#include <block_streamer/storage/tier.hpp>\n")

    def test_same_rank_in_another_folder(self):
        self.finds("rank 3 includes", architecture__a=HEAD + "#include <block_streamer/storage/tier.hpp>\n")

    def test_cycle(self):
        self.finds(
            "include cycle: core/a.hpp -> core/b.hpp -> core/a.hpp",
            core__a=HEAD + "#include <block_streamer/core/b.hpp>\n",
            core__b=HEAD + "#include <block_streamer/core/a.hpp>\n",
        )

    def test_third_party_in_the_wrong_room(self):
        for include, room in (
            ("boost/asio.hpp", "core"), ("nlohmann/json.hpp", "storage"), ("ATen/core/Tensor.h", "pipeline"),
            ("cuda_runtime_api.h", "storage"), ("c10/cuda/CUDAStream.h", "models"), ("torch/torch.h", "train"),
            ("torch/csrc/autograd/custom_function.h", "models"), ("unistd.h", "storage"), ("fmt/core.h", "core"),
        ):  # fmt: skip
            with self.subTest(include=include):
                self.finds(f"<{include}>", **{f"{room}__x": HEAD + f"#include <{include}>\n"})

    def test_third_party_in_its_room(self):
        allowed = {
            "device/cuda_call.hpp": "cuda_runtime_api.h", "text/bpe.hpp": "nlohmann/json.hpp",
            "block/stream_bridge_cuda.hpp": "c10/cuda/CUDAStream.h", "os/file.hpp": "sys/stat.h",
            "train/streamed_node.hpp": "torch/csrc/autograd/custom_function.h",
        }  # fmt: skip
        self.assertEqual(findings({n: HEAD + f"#include <{i}>\n" for n, i in allowed.items()}), [])

    def test_quotes(self):
        self.finds("angle brackets", core__x=HEAD + '#include "ids.hpp"\n')

    def test_absent_header(self):
        self.finds("does not exist", core__x=HEAD + "#include <block_streamer/core/nothing.hpp>\n")

    def test_cuda_header_in_a_header_that_exists_without_cuda(self):
        self.finds(
            "exists only with CUDA",
            device__cuda_call=HEAD, storage__x=HEAD + "#include <block_streamer/device/cuda_call.hpp>\n",
        )  # fmt: skip

    def test_form(self):
        self.finds("SPDX", core__x="#pragma once\n")
        self.finds("#pragma once", core__x="// SPDX-License-Identifier: Apache-2.0\n")
        self.finds("split at 600", core__x=HEAD + "\n" * 600)
        self.finds("macro FOO", core__x=HEAD + "#define FOO 1\n")
        self.finds("no static state", core__x=HEAD + "inline int next() {\n  static int count = 0;\n  return ++count;\n}\n")
        self.finds("no rank", nowhere__x=HEAD)
        self.finds("absolute path", core__x=HEAD + '// see "/' + 'home/somebody/x"\n')

    def test_long_function(self):
        body = "inline int Thing::run(int a) const noexcept {\n" + "  a += 1;\n" * 60 + "  return a;\n}\n"
        self.finds("Thing::run: 63 lines", core__x=HEAD + body)

    def test_stale_header_list(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "include" / "block_streamer" / "core").mkdir(parents=True)
            (root / "include" / "block_streamer" / "core" / "ids.hpp").write_text(HEAD)
            checker = check_layers.Checker(root)
            checker.check_lists()
            self.assertIn("core/ids.hpp", checker.findings[0])

    def test_functions_are_measured_past_initialisers_and_lambdas(self):
        text = "class A {\n public:\n  A(int b, std::vector<int> c)\n      : b_{b}, c_{std::move(c)} {\n    go([&] {\n      b_ = {1};\n    });\n  }\n};\n"
        self.assertEqual(check_layers.functions(text), [("A", 3, 6)])


if __name__ == "__main__":
    unittest.main()
