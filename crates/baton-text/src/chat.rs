use std::sync::Arc;

use minijinja::{
    Environment, Error, ErrorKind, Value as Jinja,
    syntax::SyntaxConfig,
    value::{Kwargs, Serde},
};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::{
    TemplateError,
    conversation::{self, Takes},
    strftime::strftime,
};

/// Steps that one rendering may take. A message costs some tens of them and 64 bytes of text one more, so this allows tens of
/// thousands of messages and bounds memory to about 256 MB.
const FUEL: u64 = 4_000_000;
const NAME: &str = "chat_template";

/// `ChatML`, for models whose metadata names no template.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\
                      {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Seconds since 1970 in UTC, for templates that print the date.
pub type Clock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// A model's chat template in a sandbox: no files, no other templates, bounded steps and memory.
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
    takes: Takes,
}

impl ChatTemplate {
    /// Compiles a Jinja template as Hugging Face writes them; `bos` and `eos` are the texts of those tokens.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<Self, TemplateError> {
        let mut environment = environment();
        // `{% generation %}` only marks text for training; it prints what is inside.
        let plain = ["{% generation %}", "{%- generation %}", "{% generation -%}", "{%- generation -%}"]
            .iter()
            .fold(source.to_owned(), |text, tag| text.replace(tag, &tag.replace("generation", "if true")));
        let plain = plain.replace("endgeneration", "endif");
        environment.add_template_owned(NAME, plain).map_err(|error| TemplateError::Syntax { message: error.to_string() })?;
        let developers = source.contains("\"developer\"") || source.contains("'developer'");
        let takes = Takes { parts: false, developers };
        let template = Self { environment, source: source.to_owned(), bos: bos.to_owned(), eos: eos.to_owned(), takes };
        Ok(Self { takes: Takes { parts: template.loops_over_parts(), ..takes }, ..template })
    }

    /// Whether a content may be a list of parts. Tried out; vLLM reads the template for a loop over contents (`_detect_content_format`).
    fn loops_over_parts(&self) -> bool {
        let [one, other] = ["one part of this", "and another one"];
        let parts = json!([{ "type": "text", "text": one }, { "type": "text", "text": other }]);
        let written = self.write(vec![json!({ "role": "user", "content": parts })], None, true, &Map::new());
        written.is_ok_and(|text| text.contains(one) && text.contains(other) && !text.contains("\"type\"") && !text.contains("'type'"))
    }

    /// The template used where a model has none.
    pub fn chatml() -> Self {
        Self::new(CHATML, "", "").expect("a constant that compiles")
    }

    /// Defines `strftime_now`.
    #[must_use]
    pub fn with_clock(mut self, clock: &Clock) -> Self {
        let clock = Arc::clone(clock);
        self.environment.add_function("strftime_now", move |format: String| strftime(&format, clock()));
        self
    }

    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the template looks at tools at all; one that does not leaves them out of the prompt silently.
    pub fn supports_tools(&self) -> bool {
        self.source.contains("tools")
    }

    /// Whether the template knows of thoughts, which a model with it writes before its answer and some servers take apart from it. Told
    /// by words, so that a template may be taken for one that does, and hardly the other way.
    pub fn knows_thoughts(&self) -> bool {
        let source = self.source.to_ascii_lowercase();
        ["think", "thought", "reason", "channel|>", "|channel", "inner_prefix"].into_iter().any(|word| source.contains(word))
    }

    /// The prompt for a conversation, whose messages and tools the template gets as it would from vLLM. `kwargs` are further variables; they
    /// cannot replace the arguments here.
    pub fn render(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        add_generation_prompt: bool,
        kwargs: &Map<String, Value>,
    ) -> Result<String, TemplateError> {
        self.write(conversation::messages(messages, self.takes)?, tools, add_generation_prompt, kwargs)
    }

    /// The prompt for a conversation whose last message is to go on: it ends where that message does.
    pub fn render_to_continue(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        kwargs: &Map<String, Value>,
    ) -> Result<String, TemplateError> {
        let mut messages = conversation::messages(messages, self.takes)?;
        let last = conversation::mark_end(&mut messages).ok_or(TemplateError::NothingToContinue)?;
        let mut prompt = self.write(messages, tools, false, kwargs)?;
        if !prompt.contains(last.trim()) {
            // The template writes it otherwise, say as JSON.
            return Err(TemplateError::NothingToContinue);
        }
        let end = conversation::until_mark(&prompt).ok_or(TemplateError::NothingToContinue)?.len();
        prompt.truncate(end);
        Ok(prompt)
    }

    fn write(
        &self,
        messages: Vec<Value>,
        tools: Option<&Value>,
        add_generation_prompt: bool,
        kwargs: &Map<String, Value>,
    ) -> Result<String, TemplateError> {
        let mut context = Map::from_iter([("bos_token".to_owned(), json!(self.bos)), ("eos_token".to_owned(), json!(self.eos))]);
        context.insert("documents".to_owned(), Value::Null);
        context.extend(kwargs.clone());
        context.insert("messages".to_owned(), Value::Array(messages));
        context.insert("tools".to_owned(), tools.map_or(Value::Null, conversation::tools));
        context.insert("add_generation_prompt".to_owned(), json!(add_generation_prompt));
        let template = self.environment.get_template(NAME).expect("added when it was built");
        template.render(Jinja::from(Serde(&context))).map_err(|error| render_error(&error))
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("source", &self.source).finish_non_exhaustive()
    }
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the default delimiters are valid"));
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", raise_exception);
    environment.add_filter("tojson", tojson);
    environment
}

/// The source of an error that the template raised itself.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: String) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "the template raised an exception").with_source(Raised(message)))
}

fn render_error(error: &Error) -> TemplateError {
    if error.kind() == ErrorKind::OutOfFuel {
        return TemplateError::OutOfFuel { fuel: FUEL };
    }
    let mut source: Option<&(dyn std::error::Error + 'static)> = std::error::Error::source(error);
    while let Some(inner) = source {
        if let Some(Raised(message)) = inner.downcast_ref() {
            return TemplateError::Raised { message: message.clone() };
        }
        source = inner.source();
    }
    TemplateError::Failed { message: error.to_string() }
}

/// JSON as Python's `json.dumps(value, ensure_ascii=False, indent=indent)` writes it, which models were trained on.
#[expect(clippy::needless_pass_by_value, reason = "the signature of a filter")]
fn tojson(value: &Jinja, kwargs: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let ascii: Option<bool> = kwargs.get("ensure_ascii")?;
    kwargs.assert_all_used()?;
    if ascii == Some(true) {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson writes text, not ASCII escapes"));
    }
    let failed = |error: serde_json::Error| Error::new(ErrorKind::BadSerialization, error.to_string());
    let mut bytes = Vec::new();
    match indent {
        Some(width) if width <= 16 => {
            let indent = " ".repeat(width);
            let formatter = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, formatter)).map_err(failed)?;
        }
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "tojson indents by at most 16")),
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, Spaced)).map_err(failed)?,
    }
    Ok(String::from_utf8(bytes).expect("JSON is UTF-8"))
}

/// `", "` and `": "` on one line.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str, messages: &Value) -> Result<String, TemplateError> {
        ChatTemplate::new(source, "<s>", "</s>")?.render(messages, None, true, &Map::new())
    }

    #[test]
    fn parts_become_lines_of_text() {
        let messages = json!([{ "role": "user", "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }] }]);
        assert_eq!(render("{{ messages[0].content }}", &messages).unwrap(), "a\nb");
        let image = json!([{ "role": "user", "content": [{ "type": "image_url", "image_url": {} }] }]);
        let error = render("", &image).unwrap_err();
        assert_eq!(error.to_string(), "message 0 has a content part of type \"image_url\"; this model takes text only");
        assert_eq!(render("", &json!([7])).unwrap_err(), TemplateError::Message { index: 0 });
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let tools = json!([{ "name": "f", "args": ["<é>", 1, 1.5, null, true] }]);
        let template = ChatTemplate::new("{{ tools | tojson }}|{{ tools[0].args | tojson(indent=2) }}", "", "").unwrap();
        let text = template.render(&json!([]), Some(&tools), true, &Map::new()).unwrap();
        // json.dumps(…, ensure_ascii=False) and with indent=2.
        let expected = "[{\"name\": \"f\", \"args\": [\"<é>\", 1, 1.5, null, true]}]|[\n  \"<é>\",\n  1,\n  1.5,\n  null,\n  true\n]";
        assert_eq!(text, expected);
        assert!(template.supports_tools());
    }

    #[test]
    fn templates_of_models_that_think_are_told_by_their_words() {
        assert!(!ChatTemplate::chatml().knows_thoughts());
        for source in
            ["{{ '<think>\\n' }}", "{% if enable_Thinking %}{% endif %}", "<|channel|>analysis", "{{ message.reasoning_content }}"]
        {
            assert!(ChatTemplate::new(source, "", "").unwrap().knows_thoughts(), "{source}");
        }
    }

    #[test]
    fn python_methods_and_loop_controls_work() {
        let source = "{% for m in messages %}{% if m.role.startswith('sys') %}{% continue %}{% endif %}{{ m.content.strip() }}{% endfor %}{{ bos_token }}";
        let messages = json!([{ "role": "system", "content": "x" }, { "role": "user", "content": " hi " }]);
        assert_eq!(render(source, &messages).unwrap(), "hi<s>");
    }

    #[test]
    fn tool_arguments_become_objects() {
        let messages =
            json!([{ "role": "assistant", "content": null, "tool_calls": [{ "function": { "name": "f", "arguments": "{\"a\":1}" } }] }]);
        assert_eq!(render("{{ messages[0].tool_calls[0].function.arguments.a }}{{ messages[0].content }}", &messages).unwrap(), "1");
    }

    #[test]
    fn a_message_goes_on_where_it_ends() {
        let continued = |source: &str, content: Value| {
            let messages = json!([{ "role": "user", "content": "say END." }, { "role": "assistant", "content": content }]);
            ChatTemplate::new(source, "", "").unwrap().render_to_continue(&messages, None, &Map::new())
        };
        let chatml =
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
        assert_eq!(continued(chatml, json!("END. And ")).unwrap(), "<user>say END.<end>\n<assistant>END. And ");
        assert_eq!(
            continued(&chatml.replace("m.content", "m.content | trim"), json!("END. And ")).unwrap(),
            "<user>say END.<end>\n<assistant>END. And"
        );
        assert_eq!(continued(chatml, json!("")).unwrap(), "<user>say END.<end>\n<assistant>");
        let parts = "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}<end>{% endfor %}";
        let content = json!([{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }]);
        assert_eq!(continued(parts, content).unwrap(), "<user>say END.<end><assistant>ab");
        assert_eq!(continued(parts, json!([])).unwrap_err(), TemplateError::NothingToContinue);
        assert_eq!(continued("{{ messages[0].content }}", json!("x")).unwrap_err(), TemplateError::NothingToContinue);
    }

    #[test]
    fn templates_that_loop_over_parts_get_parts() {
        let takes = |source: &str| ChatTemplate::new(source, "", "").unwrap().takes.parts;
        assert!(!ChatTemplate::chatml().takes.parts);
        assert!(!takes("{% for m in messages %}{{ m.content | trim }}{% endfor %}"));
        assert!(takes(
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
        ));
    }

    #[test]
    fn a_template_can_refuse_a_conversation() {
        let error = render("{{ raise_exception('roles must alternate') }}", &json!([])).unwrap_err();
        assert_eq!(error, TemplateError::Raised { message: "roles must alternate".to_owned() });
    }

    #[test]
    fn a_template_cannot_run_for_long_or_read_files() {
        let loops = "{% for a in range(9999) %}{% for b in range(9999) %}{{ b }}{% endfor %}{% endfor %}";
        assert_eq!(render(loops, &json!([])).unwrap_err(), TemplateError::OutOfFuel { fuel: FUEL });
        assert!(matches!(
            render("{{ 'x' * 10000000000 }}", &json!([])),
            Err(TemplateError::Failed { .. } | TemplateError::OutOfFuel { .. })
        ));
        assert!(matches!(render("{% include '/etc/passwd' %}", &json!([])), Err(TemplateError::Failed { .. })));
    }

    #[test]
    fn the_date_comes_from_the_clock_that_is_given() {
        let template = ChatTemplate::new("{{ strftime_now('%d %b %Y') if strftime_now is defined else 'no clock' }}", "", "").unwrap();
        assert_eq!(template.render(&json!([]), None, false, &Map::new()).unwrap(), "no clock");
        let clock: Clock = Arc::new(|| 1_795_962_758);
        assert_eq!(template.with_clock(&clock).render(&json!([]), None, false, &Map::new()).unwrap(), "29 Nov 2026");
    }

    #[test]
    fn training_marks_print_what_they_hold() {
        assert_eq!(render("{% generation %}a{% endgeneration %}b", &json!([])).unwrap(), "ab");
    }

    #[test]
    fn extra_variables_are_seen_but_cannot_replace_the_messages() {
        let kwargs = json!({ "enable_thinking": false, "messages": [] });
        let template = ChatTemplate::new("{{ enable_thinking }} {{ messages | length }}", "", "").unwrap();
        let messages = json!([{ "role": "user", "content": "x" }]);
        assert_eq!(template.render(&messages, None, true, kwargs.as_object().unwrap()).unwrap(), "False 1");
    }
}
