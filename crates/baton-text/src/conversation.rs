//! A conversation as a chat template sees it at vLLM, so that prompts are the engine's to the token: which fields of a message and of a
//! tool it passes on, how parts become text, what becomes of roles that the template does not know (vLLM 0.32,
//! `renderers/chat_utils.py` and `renderers/hf.py`, and the request's models in `entrypoints/openai/chat_completion/protocol.py`).

use serde_json::{Map, Value, json};

use crate::TemplateError;

/// Stands behind the last message while a template writes it, to be found again.
const MARK: &str = "CONTINUE_FINAL_MESSAGE_TAG ";
/// A line that one client puts in front of its system prompts, another one each time; engines leave it out.
const BILLING: &str = "x-anthropic-billing-header";

/// What a template takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Takes {
    /// Contents as lists of parts, over which it loops; else they are text.
    pub(crate) parts: bool,
    /// The role `developer`.
    pub(crate) developers: bool,
}

/// The messages as the template gets them.
pub(crate) fn messages(given: &Value, takes: Takes) -> Result<Vec<Value>, TemplateError> {
    let list = given.as_array().ok_or(TemplateError::Message { index: 0 })?;
    let messages = list.iter().enumerate().map(|(index, given)| message(index, given, takes.parts)).collect::<Result<Vec<_>, _>>()?;
    let foreign = !takes.developers && messages.iter().any(|message| message["role"] == "developer");
    Ok(if foreign { with_one_system(messages) } else { messages })
}

/// The tools as the template gets them: of each the fields that the API names, in its order. What is no tool stays as it is, for an
/// engine to complain of.
pub(crate) fn tools(given: &Value) -> Value {
    let tool = |given: &Value| {
        let Some(function) = given["function"].as_object() else { return given.clone() };
        let field = |name: &str| function.get(name).cloned().unwrap_or(Value::Null);
        let mut plain = Map::new();
        for name in ["name", "description", "parameters"] {
            plain.insert(name.to_owned(), field(name));
        }
        let deferred = |object: &Map<String, Value>| object.get("defer_loading").filter(|value| !value.is_null()).cloned();
        let outer = given.as_object().and_then(deferred);
        let further = [("strict", Some(field("strict"))), ("defer_loading", deferred(function).or_else(|| outer.clone()))];
        for (name, value) in further.into_iter().filter_map(|(name, value)| Some((name, value.filter(|value| !value.is_null())?))) {
            plain.insert(name.to_owned(), value);
        }
        let mut tool = Map::from_iter([
            ("type".to_owned(), given.get("type").cloned().unwrap_or_else(|| json!("function"))),
            ("function".to_owned(), Value::Object(plain)),
        ]);
        tool.extend(outer.map(|outer| ("defer_loading".to_owned(), outer)));
        Value::Object(tool)
    };
    given.as_array().map_or_else(|| given.clone(), |list| list.iter().map(tool).collect())
}

/// Marks the end of the last message; gives the text that it ends with, if there is any to go on with.
pub(crate) fn mark_end(messages: &mut [Value]) -> Option<String> {
    let content = messages.last_mut()?.get_mut("content")?;
    let text = if content.is_array() {
        content.as_array_mut().and_then(|parts| parts.iter_mut().rev().find_map(|part| part.get_mut("text")))
    } else {
        Some(content)
    };
    let Some(Value::String(text)) = text else { return None };
    let before = text.clone();
    text.push_str(MARK);
    Some(before)
}

/// The prompt up to its mark; `None` where the template has written the last message without its end.
pub(crate) fn until_mark(prompt: &str) -> Option<&str> {
    let at = prompt.rfind(MARK.trim_end())?;
    let (before, after) = prompt.split_at(at);
    // A template that trims its messages does so at this one's end, too.
    Some(if after.starts_with(MARK) { before } else { before.trim_end() })
}

fn message(index: usize, given: &Value, takes_parts: bool) -> Result<Value, TemplateError> {
    let field = |name: &str| given.get(name).filter(|value| !value.is_null());
    let role = given.get("role").and_then(Value::as_str).ok_or(TemplateError::Message { index })?;
    let mut parts = parts(index, given.get("content").unwrap_or(&Value::Null))?;
    if role == "system" {
        parts.retain_mut(Part::strip_billing);
    }
    // Results of tools are text for every template.
    let content = if takes_parts && role != "tool" { parts.into_iter().map(Part::into_json).collect() } else { text(&parts) };
    let mut plain = Map::from_iter([("role".to_owned(), json!(role)), ("content".to_owned(), content)]);
    let mut put = |name: &str, value: Value| _ = plain.insert(name.to_owned(), value);
    match role {
        "assistant" => {
            if let Some(calls) = field("tool_calls").and_then(Value::as_array).filter(|calls| !calls.is_empty()) {
                put("tool_calls", calls.iter().map(tool_call).collect());
            }
            if let Some(reasoning) = field("reasoning").or_else(|| field("reasoning_content")) {
                put("reasoning", reasoning.clone());
                put("reasoning_content", reasoning.clone());
            }
        }
        "tool" => {
            if let Some(id) = given.get("tool_call_id") {
                put("tool_call_id", id.clone());
            }
        }
        "developer" => put("tools", given.get("tools").cloned().unwrap_or(Value::Null)),
        _ => {}
    }
    for name in ["name", "task"] {
        if let Some(value) = given.get(name).filter(|value| value.is_string()) {
            put(name, value.clone());
        }
    }
    Ok(Value::Object(plain))
}

/// The fields that the API names, in its order. Arguments are the object that templates ask for; what is none counts as empty, since a
/// conversation goes on after a call that failed.
fn tool_call(given: &Value) -> Value {
    let Some(function) = given["function"].as_object() else { return given.clone() };
    let arguments = match function.get("arguments") {
        Some(Value::String(text)) => serde_json::from_str(text).unwrap_or_default(),
        Some(value) => value.clone(),
        None => Value::Null,
    };
    let mut plain = Map::from_iter([("arguments".to_owned(), if arguments.is_object() { arguments } else { json!({}) })]);
    plain.extend(function.get("name").map(|name| ("name".to_owned(), name.clone())));
    let mut call = Map::new();
    call.extend(given.get("id").map(|id| ("id".to_owned(), id.clone())));
    call.insert("function".to_owned(), Value::Object(plain));
    call.extend(given.get("type").map(|kind| ("type".to_owned(), kind.clone())));
    Value::Object(call)
}

/// A part of a content, which is text.
struct Part<'a> {
    text: &'a str,
    /// As the client wrote it, where it wrote parts.
    fields: Option<&'a Map<String, Value>>,
}

impl Part<'_> {
    /// What a template that loops over parts gets: the text, and fields that the API does not know.
    fn into_json(self) -> Value {
        const KNOWN: [&str; 5] = ["type", "text", "refusal", "thinking", "uuid"];
        let mut part = Map::from_iter([("type".to_owned(), json!("text")), ("text".to_owned(), json!(self.text))]);
        let further = self.fields.into_iter().flatten().filter(|(name, _)| !KNOWN.contains(&name.as_str()));
        part.extend(further.map(|(name, value)| (name.clone(), value.clone())));
        Value::Object(part)
    }

    /// Whether anything is left without the line.
    fn strip_billing(&mut self) -> bool {
        if !self.text.starts_with(BILLING) {
            return true;
        }
        self.text = self.text.split_once('\n').map_or("", |(_, rest)| rest);
        !self.text.is_empty()
    }
}

fn parts(index: usize, content: &Value) -> Result<Vec<Part<'_>>, TemplateError> {
    match content {
        Value::Null => Ok(Vec::new()),
        Value::String(text) => Ok(vec![Part { text, fields: None }]),
        Value::Array(parts) => parts.iter().filter_map(|given| part(index, given).transpose()).collect(),
        Value::Bool(_) | Value::Number(_) | Value::Object(_) => {
            Err(TemplateError::ContentPart { index, kind: json_kind(content).to_owned() })
        }
    }
}

/// `None` for a text that is null.
fn part(index: usize, given: &Value) -> Result<Option<Part<'_>>, TemplateError> {
    if let Some(text) = given.as_str() {
        return Ok(Some(Part { text, fields: None }));
    }
    let (kind, fields) = (given["type"].as_str(), given.as_object());
    let text = match kind {
        Some("text" | "input_text" | "output_text") => &given["text"],
        Some("refusal") => &given["refusal"],
        Some("thinking") => &given["thinking"],
        Some(_) | None => &Value::Bool(false),
    };
    match text {
        Value::String(text) => Ok(Some(Part { text, fields })),
        Value::Null => Ok(None),
        Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
            Err(TemplateError::ContentPart { index, kind: kind.unwrap_or_else(|| json_kind(given)).to_owned() })
        }
    }
}

/// Parts as lines; empty ones are none.
fn text(parts: &[Part<'_>]) -> Value {
    let lines: Vec<&str> = parts.iter().map(|part| part.text).filter(|text| !text.is_empty()).collect();
    Value::String(lines.join("\n"))
}

/// Developers speak as the system does, and all of that comes first as one message.
fn with_one_system(messages: Vec<Value>) -> Vec<Value> {
    let speaks = |message: &Value| matches!(message["role"].as_str(), Some("system" | "developer"));
    let is_first = messages.first().is_some_and(speaks);
    let (mut system, mut rest): (Vec<Value>, Vec<Value>) = messages.into_iter().partition(speaks);
    let first = if is_first && system.len() == 1 {
        // It keeps its parts and its name.
        let mut only = system.remove(0);
        only["role"] = json!("system");
        only.as_object_mut().map(|only| only.shift_remove("tools"));
        only
    } else {
        let said: Vec<String> = system.iter().map(|message| plain_text(&message["content"])).filter(|text| !text.is_empty()).collect();
        json!({ "role": "system", "content": said.join("\n\n") })
    };
    rest.insert(0, first);
    rest
}

fn plain_text(content: &Value) -> String {
    let parts = content.as_array().map(|parts| parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n"));
    parts.or_else(|| content.as_str().map(str::to_owned)).unwrap_or_default()
}

fn json_kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: Takes = Takes { parts: false, developers: false };
    const PARTS: Takes = Takes { parts: true, developers: true };

    fn one(given: &Value, takes: Takes) -> Value {
        messages(&json!([given]), takes).unwrap().remove(0)
    }

    #[test]
    fn of_a_message_only_what_the_api_names_is_seen() {
        let given = json!({ "role": "assistant", "content": null, "refusal": null, "audio": {}, "name": "ada", "tool_calls": [],
            "reasoning_content": "because", "tool_call_id": "c" });
        let seen = json!({ "role": "assistant", "content": "", "reasoning": "because", "reasoning_content": "because", "name": "ada" });
        assert_eq!(one(&given, TEXT), seen);
        let result = json!({ "role": "tool", "tool_call_id": "c", "content": [{ "type": "text", "text": "4" }, { "type": "text", "text": "2" }], "tool_calls": [1] });
        for takes in [TEXT, PARTS] {
            assert_eq!(one(&result, takes), json!({ "role": "tool", "content": "4\n2", "tool_call_id": "c" }));
        }
        assert_eq!(one(&json!({ "role": "user" }), PARTS), json!({ "role": "user", "content": [] }));
    }

    #[test]
    fn parts_are_lines_or_stay_parts() {
        let given = json!({ "role": "user", "content": ["a", { "type": "text", "text": "" }, { "type": "input_text", "text": "b", "cache": 1 },
            { "type": "refusal", "refusal": null }, { "type": "thinking", "thinking": "c" }] });
        assert_eq!(one(&given, TEXT)["content"], "a\nb\nc");
        let text = |text: &str| json!({ "type": "text", "text": text });
        let b = json!({ "type": "text", "text": "b", "cache": 1 });
        assert_eq!(one(&given, PARTS)["content"], json!([text("a"), text(""), b, text("c")]));
        for (part, kind) in [(json!({ "type": "image_url", "image_url": {} }), "image_url"), (json!({}), "object"), (json!(7), "number")] {
            let error = messages(&json!([{ "role": "user", "content": [part] }]), PARTS).unwrap_err();
            assert_eq!(error, TemplateError::ContentPart { index: 0, kind: kind.to_owned() });
        }
    }

    #[test]
    fn arguments_of_calls_are_objects_whatever_was_written() {
        let call = |arguments: Value| json!({ "id": "c", "type": "function", "function": { "name": "f", "arguments": arguments } });
        let given = [json!("{\"b\": 1, \"a\": 2}"), json!({ "x": 1 }), json!("not json"), json!("[1]"), json!(""), Value::Null].map(call);
        let seen = one(&json!({ "role": "assistant", "tool_calls": given }), TEXT);
        let arguments: Vec<String> =
            seen["tool_calls"].as_array().unwrap().iter().map(|call| call["function"]["arguments"].to_string()).collect();
        assert_eq!(seen["tool_calls"][1].to_string(), r#"{"id":"c","function":{"arguments":{"x":1},"name":"f"},"type":"function"}"#);
        assert_eq!(arguments, ["{\"b\":1,\"a\":2}", "{\"x\":1}", "{}", "{}", "{}", "{}"]);
    }

    #[test]
    fn tools_have_the_apis_fields_in_its_order() {
        let given = json!([
            { "function": { "parameters": { "z": 1, "a": 2 }, "name": "f", "extra": true, "strict": null }, "type": "function", "x": 1 },
            { "type": "function", "function": { "name": "g", "strict": true, "description": "d" }, "defer_loading": false },
            { "type": "web_search" },
        ]);
        let seen = "[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"description\":null,\"parameters\":{\"z\":1,\"a\":2}}},\
                    {\"type\":\"function\",\"function\":{\"name\":\"g\",\"description\":\"d\",\"parameters\":null,\"strict\":true,\"defer_loading\":false},\"defer_loading\":false},\
                    {\"type\":\"web_search\"}]";
        assert_eq!(tools(&given).to_string(), seen);
        assert_eq!(tools(&Value::Null), Value::Null);
    }

    #[test]
    fn developers_speak_as_the_system_where_the_template_does_not_know_them() {
        let say = |role: &str, content: &str| json!({ "role": role, "content": content });
        let given = json!([say("system", "a"), say("user", "b"), say("developer", "c"), say("system", "")]);
        assert_eq!(messages(&given, TEXT).unwrap(), [say("system", "a\n\nc"), say("user", "b")]);
        assert_eq!(messages(&json!([say("developer", "a")]), TEXT).unwrap(), [say("system", "a")]);
        let kept = messages(&given, Takes { developers: true, ..TEXT }).unwrap();
        assert_eq!(kept[2], json!({ "role": "developer", "content": "c", "tools": null }));
    }

    #[test]
    fn a_line_that_is_another_one_each_time_is_left_out() {
        let system = |text: &str| one(&json!({ "role": "system", "content": text }), TEXT)["content"].clone();
        assert_eq!(system("x-anthropic-billing-header: cch=1\nbe brief"), "be brief");
        assert_eq!(system("x-anthropic-billing-header: cch=1"), "");
        let user = "x-anthropic-billing-header: cch=1\nhi";
        assert_eq!(one(&json!({ "role": "user", "content": user }), TEXT)["content"], user);
    }
}
