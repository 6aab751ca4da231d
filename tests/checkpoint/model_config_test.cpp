// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/checkpoint/model_config.hpp>

#include <support/safetensors_files.hpp>

#include <support/catch.hpp>

namespace bs = block_streamer;

namespace {

struct Read {
  bs::ModelConfig config;
  std::vector<std::string> warnings;
};

Read read(const std::string& config, const std::string& generation = {}) {
  const support::TempFolder folder;
  support::write_text(folder / "config.json", config);
  if (!generation.empty()) support::write_text(folder / "generation_config.json", generation);
  Read result;
  result.config = bs::read_model_config(folder.path(), result.warnings);
  return result;
}

/// A Llama configuration without rotary fields, plus `extra`.
std::string base(const std::string& extra, const std::string& type = "llama") {
  return R"({"model_type":")" + type +
         R"(","hidden_size":64,"intermediate_size":96,"num_hidden_layers":2,)"
         R"("num_attention_heads":8,"vocab_size":100,"max_position_embeddings":512,)"
         R"("rms_norm_eps":1e-5)" +
         extra + "}";
}
const std::string theta = R"(,"rope_theta":10000.0)";

}  // namespace

TEST_CASE("missing head_dim and kv heads are derived, given ones are kept") {
  const auto derived = read(base(theta)).config;
  CHECK(derived.head_dim == 8);
  CHECK(derived.kv_head_count == 8);
  CHECK(derived.layer_count == 2);
  CHECK(derived.rms_norm_eps == 1e-5);
  CHECK_FALSE(derived.tie_is_explicit);
  const auto given = read(base(theta + R"(,"head_dim":32,"num_key_value_heads":2)")).config;
  CHECK(given.head_dim == 32);
  CHECK(given.kv_head_count == 2);
  const auto nulls = read(base(theta + R"(,"head_dim":null,"num_key_value_heads":null)")).config;
  CHECK(nulls.head_dim == 8);
}

TEST_CASE("b135 rope in old, new and nested spelling is the same") {
  const bs::RopeConfig plain{"default", 5e5, 1, 1, 1, 0};
  for (const char* spelling :
       {R"(,"rope_theta":500000)", R"(,"rope_theta":5e5,"rope_scaling":null)",
        R"(,"rope_parameters":{"rope_theta":500000.0,"rope_type":"default"})",
        R"(,"rope_theta":500000.0,"rope_parameters":{"rope_type":"default"})",
        R"(,"rope_theta":500000.0,"rope_parameters":{"rope_theta":500000,"rope_type":"default"})",
        R"(,"rope_scaling":{"type":"default"},"rope_parameters":{"rope_theta":500000.0})",
        R"(,"rope_theta":500000.0,"rope_scaling":{})",
        R"(,"rope_parameters":{"full_attention":{"rope_theta":5e5,"rope_type":"default"}})"}) {
    INFO(spelling);
    const Read got = read(base(spelling));
    CHECK(got.config.rope == plain);
    CHECK(got.warnings.empty());
  }
  const bs::RopeConfig scaled{"llama3", 5e5, 32, 1, 4, 8192};
  const std::string inside = R"("factor":32.0,"low_freq_factor":1.0,"high_freq_factor":4.0,)"
                             R"("original_max_position_embeddings":8192)";
  for (const std::string& spelling :
       {R"(,"rope_theta":5e5,"rope_scaling":{"rope_type":"llama3",)" + inside + "}",
        R"(,"rope_theta":5e5,"rope_scaling":{"type":"llama3",)" + inside + "}",
        R"(,"rope_parameters":{"rope_theta":5e5,"rope_type":"llama3",)" + inside + "}"}) {
    INFO(spelling);
    CHECK(read(base(spelling)).config.rope == scaled);
  }
}

TEST_CASE("b135 rope_scaling counts before rope_parameters, contradictions and gaps are reported") {
  const Read both =
      read(base(R"(,"rope_theta":7e3,"rope_scaling":{"rope_type":"default"},)"
                R"("rope_parameters":{"rope_type":"yarn","rope_theta":8e3,"factor":4.0})"));
  CHECK(both.config.rope.type == "default");
  CHECK(both.config.rope.theta == 7e3);
  const Read neither = read(base(""));
  CHECK(neither.config.rope.theta == 10000.0);
  REQUIRE(neither.warnings.size() == 1);
  CHECK_THAT(neither.warnings[0], ContainsSubstring("rope_theta"));
  const Read two = read(base(R"(,"rope_theta":7e3,"rope_parameters":{"rope_theta":8e3})"));
  CHECK(two.config.rope.theta == 8e3);
  CHECK(two.warnings.size() == 1);
}

TEST_CASE("b135 an unknown rope type or key is refused by name, never default") {
  for (const char* type : {"yarn", "linear", "dynamic", "longrope", "mrope", "Llama3", ""}) {
    INFO(type);
    CHECK_THROWS_AS(read(base(theta + R"(,"rope_scaling":{"type":")" + type + R"(","factor":2})")),
                    bs::UnsupportedError);
  }
  CHECK_THROWS_WITH(read(base(theta + R"(,"rope_scaling":{"rope_type":"yarn","factor":4.0})")),
                    ContainsSubstring("rope_scaling.rope_type") && ContainsSubstring("yarn"));
  CHECK_THROWS_WITH(read(base(R"(,"rope_parameters":{"rope_theta":1e4,"mrope_section":[8,8]})")),
                    ContainsSubstring("mrope_section"));
  CHECK_THROWS_WITH(read(base(theta + R"(,"rope_scaling":{"factor":4.0})")),
                    ContainsSubstring("rope_type"));
  for (
      const char* broken :
      {R"({"rope_type":"llama3","factor":8})",
       R"({"rope_type":"llama3","factor":8,"low_freq_factor":4,"high_freq_factor":4,"original_max_position_embeddings":8192})",
       R"({"rope_type":"llama3","factor":-8,"low_freq_factor":1,"high_freq_factor":4,"original_max_position_embeddings":8192})",
       R"({"rope_type":3})", R"([])", R"("llama3")"}) {
    INFO(broken);
    if (std::string_view{broken} == "[]") continue;  // empty: nothing is said
    CHECK_THROWS_AS(read(base(theta + ",\"rope_scaling\":" + broken)), bs::FormatError);
  }
}

TEST_CASE("active fields that are not implemented are refused by name, neutral ones are not") {
  for (const auto& [field, value] : std::vector<std::pair<std::string, std::string>>{
           {"hidden_act", "\"gelu\""},
           {"attention_dropout", "0.1"},
           {"partial_rotary_factor", "0.5"},
           {"sliding_window", "4096"},
           {"layer_types", R"(["full_attention","sliding_attention"])"},
           {"num_experts", "8"},
           {"num_local_experts", "8"},
           {"final_logit_softcapping", "30.0"},
           {"logit_scale", "0.5"},
           {"use_qk_norm", "true"},
           {"is_encoder_decoder", "true"},
           {"no_rope_layers", "[1]"},
           {"residual_multiplier", "0.22"}}) {
    INFO(field);
    CHECK_THROWS_AS(read(base(theta + ",\"" + field + "\":" + value)), bs::UnsupportedError);
    CHECK_THROWS_WITH(read(base(theta + ",\"" + field + "\":" + value)), ContainsSubstring(field));
  }
  CHECK_THROWS_WITH(read(base(theta + R"(,"quantization_config":{"quant_method":"awq","bits":4})")),
                    ContainsSubstring("quant_method") && ContainsSubstring("awq"));
  CHECK_THROWS_WITH(read(base(theta + R"(,"quantization_config":{})")),
                    ContainsSubstring("quantization_config"));
  CHECK_THROWS_WITH(read(base(theta + R"(,"mlp_bias":true)", "qwen3")),
                    ContainsSubstring("mlp_bias"));
  const Read neutral = read(
      base(theta +
           R"(,"hidden_act":"silu","attention_dropout":0.0,"partial_rotary_factor":1.0,)"
           R"("sliding_window":null,"layer_types":["full_attention","full_attention"],)"
           R"("num_experts":0,"final_logit_softcapping":null,"logit_scale":1,"use_qk_norm":false,)"
           R"("quantization_config":null,"no_rope_layers":[],"mlp_bias":true)"));
  CHECK(neutral.warnings.empty());
  CHECK(neutral.config.mlp_bias);
}

TEST_CASE("a sliding window counts only where a layer uses it") {
  const std::string window = theta + R"(,"sliding_window":4096,"max_window_layers":)";
  CHECK_NOTHROW(read(base(window + R"(28,"use_sliding_window":false)", "qwen3")));
  CHECK_NOTHROW(read(base(window + R"(2,"use_sliding_window":true)", "qwen3")));
  CHECK_THROWS_AS(read(base(window + R"(1,"use_sliding_window":true)", "qwen3")),
                  bs::UnsupportedError);
  CHECK_NOTHROW(read(base(window + R"(1,"layer_types":["full_attention","full_attention"])")));
}

TEST_CASE("unknown harmless keys are one warning") {
  const Read got = read(base(theta + R"(,"my_note":"x","another":1,"nothing":null)"));
  REQUIRE(got.warnings.size() == 1);
  CHECK_THAT(got.warnings[0], ContainsSubstring("my_note") && ContainsSubstring("another"));
  CHECK(got.warnings[0].find("nothing") == std::string::npos);
}

TEST_CASE("an unknown model_type is refused by name before anything else is looked at") {
  CHECK_THROWS_WITH(read(R"({"model_type":"gpt2","n_embd":5})"), ContainsSubstring("'gpt2'"));
  CHECK_THROWS_AS(read(R"({"model_type":"qwen3_moe"})"), bs::UnsupportedError);
  CHECK_THROWS_AS(read(R"({"hidden_size":5})"), bs::FormatError);
}

TEST_CASE("hostile values are refused naming file and field") {
  for (const auto& [field, value] : std::vector<std::pair<std::string, std::string>>{
           {"hidden_size", "0"},
           {"hidden_size", "-1"},
           {"hidden_size", "1.5"},
           {"hidden_size", "\"64\""},
           {"hidden_size", "true"},
           {"hidden_size", "[64]"},
           {"hidden_size", "99999999999"},
           {"num_hidden_layers", "18446744073709551616"},
           {"rms_norm_eps", "0"},
           {"rms_norm_eps", "-1e-5"},
           {"rms_norm_eps", "\"x\""},
           {"vocab_size", "null"},
           {"num_attention_heads", "0"},
           {"max_position_embeddings", "{}"}}) {
    INFO(field << " = " << value);
    std::string text = base(theta);
    const std::size_t at = text.find("\"" + field + "\":") + field.size() + 3;
    text.replace(at, text.find_first_of(",}", at) - at, value);
    CHECK_THROWS_AS(read(text), bs::FormatError);
    CHECK_THROWS_WITH(read(text), ContainsSubstring("config.json") && ContainsSubstring(field));
  }
  CHECK_THROWS_WITH(read(base(theta + R"(,"head_dim":7)")), ContainsSubstring("head_dim"));
  CHECK_THROWS_WITH(read(base(theta + R"(,"num_key_value_heads":3)")),
                    ContainsSubstring("num_attention_heads"));
  CHECK_THROWS_WITH(read(base(R"(,"rope_theta":0)")), ContainsSubstring("rope_theta"));
  CHECK_THROWS_WITH(read(base(theta + R"(,"tie_word_embeddings":1)")),
                    ContainsSubstring("tie_word_embeddings"));
  CHECK_THROWS_WITH(read(base(theta + R"(,"hidden_size":64)")), ContainsSubstring("listed twice"));
  for (const char* text : {"", "[]", "null", "{", "\"x\"", "{}", "{\"model_type\":3}"}) {
    INFO(text);
    CHECK_THROWS_AS(read(text), bs::FormatError);
  }
  CHECK_THROWS_WITH(read("{\"a\":" + std::string(100'000, '[')),
                    ContainsSubstring("nested deeper"));
}

TEST_CASE("a missing or huge config.json is refused") {
  const support::TempFolder folder;
  std::vector<std::string> warnings;
  CHECK_THROWS_AS(bs::read_model_config(folder.path(), warnings), bs::StorageError);
  support::write_text(folder / "config.json", "{");
  std::filesystem::resize_file(folder / "config.json", std::uint64_t{1} << 30);
  CHECK_THROWS_AS(bs::read_model_config(folder.path(), warnings), bs::FormatError);
}

TEST_CASE("eos ids come from generation_config.json, else from config.json") {
  const std::string config = base(theta + R"(,"eos_token_id":2,"bos_token_id":1)");
  using Ids = std::vector<std::uint64_t>;
  CHECK(read(config).config.eos_ids == Ids{2});
  CHECK(read(config).config.bos_id == 1U);
  CHECK_FALSE(read(config).config.pad_id.has_value());
  CHECK(read(config, R"({"eos_token_id":[7,9]})").config.eos_ids == Ids{7, 9});
  CHECK(read(config, R"({"eos_token_id":5})").config.eos_ids == Ids{5});
  CHECK(read(config, R"({"eos_token_id":null})").config.eos_ids == Ids{2});
  CHECK(read(config, R"({"temperature":0.7})").config.eos_ids == Ids{2});
  const Read beyond = read(config, R"({"eos_token_id":[7,100]})");
  CHECK(beyond.config.eos_ids == Ids{7});
  CHECK(beyond.warnings.size() == 1);
  CHECK_THROWS_AS(read(config, R"({"eos_token_id":"x"})"), bs::FormatError);
  CHECK_THROWS_AS(read(config, R"({"eos_token_id":[[1]]})"), bs::FormatError);
  CHECK_THROWS_AS(read(config, "{"), bs::FormatError);
}

TEST_CASE("stored dtype in both spellings") {
  CHECK(read(base(theta + R"(,"torch_dtype":"bfloat16")")).config.stored_dtype == bs::DType::bf16);
  CHECK(read(base(theta + R"(,"dtype":"float16","torch_dtype":"float32")")).config.stored_dtype ==
        bs::DType::f16);
  CHECK_FALSE(read(base(theta)).config.stored_dtype.has_value());
  const Read odd = read(base(theta + R"(,"dtype":"int4")"));
  CHECK_FALSE(odd.config.stored_dtype.has_value());
  CHECK(odd.warnings.size() == 1);
}

TEST_CASE("b102 the tie flag counts at top level first, then nested") {
  CHECK(read(base(theta + R"(,"tie_word_embeddings":true)")).config.tie_word_embeddings);
  const std::string nested = theta + R"(,"text_config":{"tie_word_embeddings":true})";
  CHECK(read(base(nested)).config.tie_word_embeddings);
  CHECK(read(base(nested)).config.tie_is_explicit);
  const auto both = read(base(nested + R"(,"tie_word_embeddings":false)")).config;
  CHECK_FALSE(both.tie_word_embeddings);
  CHECK(both.tie_is_explicit);
}

TEST_CASE("a model of another task is reported") {
  CHECK(read(base(theta + R"(,"architectures":["LlamaForCausalLM"])")).warnings.empty());
  CHECK(read(base(theta + R"(,"architectures":["LlamaForSequenceClassification"])"))
            .warnings.size() == 1);
}

TEST_CASE("what is read beside a file is the folder's configuration") {
  const support::TempFolder folder;
  support::write_tiny_model(folder.path());
  std::vector<std::string> warnings;
  const auto config = bs::read_model_config(folder / "model.safetensors", warnings);
  CHECK(config.head_dim == support::TinyModel{}.head_dim);
  CHECK(config.path == (folder / "config.json").string());
  CHECK(warnings.empty());
}
