// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/text/template_text.hpp>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace block_streamer::inline v1 {

/// How one of the known templates renders system, user and assistant messages. All of them write a
/// message as "<|im_start|>role\ncontent<|im_end|>\n".
struct TemplateStyle {
  std::string name;
  /// Put in front if the first message is not a system message.
  std::optional<std::string> default_system;
  /// Assistant messages after the last query carry their reasoning in a <think> block.
  bool thinks = false;
  /// The generation prompt can be given an empty <think> block (enable_thinking = false).
  bool can_disable_thinking = false;
  /// Follows "<|im_start|>assistant\n" in the generation prompt.
  std::string prompt_suffix;
};

namespace detail {

/// The parts of Qwen3's templates that render messages without tools; what lies between them
/// renders tools only. The template was revised once, hence two spellings of several parts.
namespace qwen3 {

inline constexpr std::string_view tools = "{%- if tools %}";
inline constexpr std::string_view system = R"({%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
    {%- endif %}
{%- endif %})";

inline constexpr std::string_view query_head = R"(
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and )";
inline constexpr std::string_view query_tail =
    R"(not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %})";

inline constexpr std::string_view loop_first = R"(
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %})";
inline constexpr std::string_view loop_revised = R"(
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %})";

inline constexpr std::string_view reasoning_first = R"(
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in message.content %}
                {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
                {%- set reasoning_content = message.content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %})";
inline constexpr std::string_view reasoning_revised = R"(
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %})";
inline constexpr std::string_view assistant_thinking = R"(
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %})";
inline constexpr std::string_view assistant_plain = R"(
        {{- '<|im_start|>' + message.role + '\n' + content }})";
inline constexpr std::string_view tool_calls = "{%- if message.tool_calls %}";
inline constexpr std::string_view end_of_assistant = R"(
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %})";

inline constexpr std::string_view end_of_loop = R"(
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %})";
inline constexpr std::string_view prompt_switch = R"(
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %})";
inline constexpr std::string_view prompt_plain = R"(
    {{- '<|im_start|>assistant\n' }}
{%- endif %})";
inline constexpr std::string_view prompt_thinking = R"(
    {{- '<|im_start|>assistant\n<think>\n' }}
{%- endif %})";

}  // namespace qwen3

inline std::string joined(std::initializer_list<std::string_view> parts) {
  std::string text;
  for (const std::string_view part : parts) text += part;
  return canonical_template(text);
}

inline std::optional<TemplateStyle> recognize_qwen3(std::string_view canonical) {
  using namespace qwen3;
  const std::string query_first = joined({system, query_head, query_tail, loop_first,
                                          reasoning_first, assistant_thinking, tool_calls});
  const std::string query_revised =
      joined({system, query_head, "message.content is string and ", query_tail, loop_revised,
              reasoning_revised, assistant_thinking, tool_calls});
  const std::string query_mixed = joined({system, query_head, query_tail, loop_revised,
                                          reasoning_revised, assistant_thinking, tool_calls});
  const std::string instruct = joined({system, loop_revised, assistant_plain, tool_calls});
  struct Prompt {
    std::string_view text;
    bool can_disable;
    const char* suffix;
  };
  const Prompt prompts[] = {
      {prompt_switch, true, ""}, {prompt_plain, false, ""}, {prompt_thinking, false, "<think>\n"}};
  for (const std::string* middle : {&query_first, &query_revised, &query_mixed, &instruct}) {
    for (const Prompt& prompt : prompts) {
      const std::vector<std::string> pieces = {joined({tools}), *middle, joined({end_of_assistant}),
                                               joined({end_of_loop, prompt.text})};
      if (!consists_of(canonical, pieces)) continue;
      return TemplateStyle{"Qwen3", {}, middle != &instruct, prompt.can_disable, prompt.suffix};
    }
  }
  return std::nullopt;
}

/// ChatML with or without a default system message, which may have any text.
inline std::optional<TemplateStyle> recognize_chatml(std::string_view canonical) {
  constexpr std::string_view mark = "DEFAULT";
  const std::string messages = joined(
      {"{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
       "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"});
  const std::string loop = joined({"{% for message in messages %}"});
  if (canonical == loop + messages) return TemplateStyle{"ChatML", {}, false, false, ""};
  const std::string with_default =
      loop +
      joined({"{% if loop.first and messages[0]['role'] != 'system' %}"
              "{{ '<|im_start|>system\nDEFAULT<|im_end|>\n' }}{% endif %}"}) +
      messages;
  const std::size_t at = with_default.find(mark);
  const std::string_view head = std::string_view{with_default}.substr(0, at);
  const std::string_view tail = std::string_view{with_default}.substr(at + mark.size());
  if (canonical.size() < head.size() + tail.size() || !canonical.starts_with(head) ||
      !canonical.ends_with(tail)) {
    return std::nullopt;
  }
  const std::string_view text =
      canonical.substr(head.size(), canonical.size() - head.size() - tail.size());
  if (text.find_first_of("'{}") != std::string_view::npos) return std::nullopt;
  return TemplateStyle{"ChatML with a default system message", std::string{text}, false, false, ""};
}

}  // namespace detail

/// @brief The style of a template text, if it is one of the known ones.
[[nodiscard]] inline std::optional<TemplateStyle> recognize_template(std::string_view text) {
  const std::string canonical = canonical_template(text);
  if (auto style = detail::recognize_chatml(canonical)) return style;
  return detail::recognize_qwen3(canonical);
}

}  // namespace block_streamer::inline v1
