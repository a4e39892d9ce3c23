// One check of the npm `openai` client against a running line; exits 0 if it holds, else throws.
//   node openai_client.mjs CHECK MODEL GATEWAY_URL OTHER_GATEWAY_URL
//   node openai_client.mjs names

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [check, model, ...urls] = process.argv.slice(2);
const [client, other] = urls.map(
  (url) => new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 60_000 }),
);

const question = "What is the capital of Germany?";
const messages = [{ role: "user", content: question }];
const city = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const Answer = z.object({ mood: z.enum(["sunny", "rainy"]), hot: z.boolean() });

function chat(fields) {
  const body = { model, messages, temperature: 0, max_tokens: 16, ...fields };
  return client.chat.completions.create(body);
}

function complete(fields) {
  const body = { model, prompt: "Once upon a time", temperature: 0, max_tokens: 12, ...fields };
  return client.completions.create(body);
}

async function collect(stream) {
  const items = [];
  for await (const item of await stream) items.push(item);
  return items;
}

// Asks for a call, then answers it; `ask` gives the completion for the fields of a request.
async function toolLoop(ask) {
  const named = { type: "function", function: { name: "weather" } };
  const asked = (await ask(toolFields(messages, named, 40))).choices[0];
  assert.equal(asked.finish_reason, "tool_calls");
  assert.equal(asked.message.tool_calls.length, 1);
  const [call] = asked.message.tool_calls;
  assert.equal(call.function.name, "weather");
  assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["city"]);
  const result = { role: "tool", tool_call_id: call.id, content: "18 degrees, sunny" };
  const turns = [...messages, asked.message, result];
  const answered = (await ask(toolFields(turns, "none", 8))).choices[0];
  assert.ok(answered.message.content);
  assert.ok(!answered.message.tool_calls?.length);
}

function toolFields(messages, tool_choice, max_tokens) {
  const tools = [{ type: "function", function: { name: "weather", parameters: city } }];
  return { model, messages, tools, tool_choice, temperature: 0, max_tokens };
}

const checks = {
  async chat() {
    const completion = await chat({});
    assert.equal(completion.object, "chat.completion");
    assert.equal(completion.model, model);
    assert.match(completion.choices[0].message.content, /Berlin/);
    const { prompt_tokens, completion_tokens, total_tokens } = completion.usage;
    assert.equal(total_tokens, prompt_tokens + completion_tokens);
    assert.ok(completion._request_id);
  },

  async chat_streamed() {
    const whole = await chat({});
    const chunks = await collect(chat({ stream: true, stream_options: { include_usage: true } }));
    const last = chunks.pop();
    assert.deepEqual(last.choices, []);
    assert.equal(last.usage.completion_tokens, whole.usage.completion_tokens);
    const deltas = chunks.map((chunk) => chunk.choices[0].delta.content ?? "");
    assert.ok(deltas.length > 3);
    assert.equal(deltas.join(""), whole.choices[0].message.content);
    assert.equal(chunks.at(-1).choices[0].finish_reason, whole.choices[0].finish_reason);
    const fields = { model, messages, temperature: 0, max_tokens: 16 };
    const stream = client.chat.completions.stream(fields);
    assert.equal(await stream.finalContent(), whole.choices[0].message.content);
  },

  async completions() {
    const whole = await complete({ logprobs: 2 });
    const [choice] = whole.choices;
    assert.equal(whole.usage.completion_tokens, 12);
    assert.equal(choice.logprobs.tokens.join(""), choice.text);
    const chunks = await collect(complete({ stream: true }));
    assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), choice.text);
    assert.equal(chunks.at(-1).choices[0].finish_reason, "length");
  },

  async parse() {
    const response_format = zodResponseFormat(Answer, "answer");
    const completion = await client.chat.completions.parse({
      model, messages, response_format, seed: 3, max_tokens: 60,
    });
    const { parsed } = completion.choices[0].message;
    assert.deepEqual(Answer.parse(parsed), parsed);
  },

  async tool_loop() {
    await toolLoop((fields) => client.chat.completions.create(fields));
  },

  async tool_loop_streamed() {
    // The client's own reducer joins the deltas.
    await toolLoop((fields) =>
      client.chat.completions.stream(fields).finalChatCompletion(),
    );
  },

  async logprobs() {
    const fields = { logprobs: true, top_logprobs: 3, max_tokens: 6 };
    const [choice] = (await chat(fields)).choices;
    const entries = choice.logprobs.content;
    const bytes = Buffer.from(entries.flatMap((entry) => entry.bytes));
    assert.equal(bytes.toString(), choice.message.content);
    for (const { token, logprob, top_logprobs: best } of entries) {
      assert.equal(best.length, 3);
      assert.deepEqual([token, logprob], [best[0].token, best[0].logprob]);
      assert.ok(0 >= best[0].logprob && best[0].logprob >= best[1].logprob);
    }
    const chunks = await collect(chat({ ...fields, stream: true }));
    const streamed = chunks.flatMap((chunk) => chunk.choices[0]?.logprobs?.content ?? []);
    assert.deepEqual(streamed, entries);
  },

  async three_choices() {
    const fields = { n: 3, seed: 7, temperature: 1.2 };
    const contents = (await chat(fields)).choices.map((choice) => choice.message.content);
    assert.equal(new Set(contents).size, 3);
    const streamed = ["", "", ""];
    for (const chunk of await collect(chat({ ...fields, stream: true }))) {
      for (const { index, delta } of chunk.choices) streamed[index] += delta.content ?? "";
    }
    assert.deepEqual(streamed, contents);
  },

  async response_by_another_gateway() {
    const fields = { model, temperature: 0, max_output_tokens: 24 };
    const stream = client.responses.stream({ ...fields, input: question });
    const events = await collect(stream);
    const final = await stream.finalResponse();
    assert.deepEqual(events.map((event) => event.sequence_number), [...events.keys()]);
    assert.equal(events[0].type, "response.created");
    assert.equal(events.at(-1).type, "response.completed");
    const deltas = events.filter((event) => event.type === "response.output_text.delta");
    assert.ok(deltas.length > 3);
    assert.equal(deltas.map((event) => event.delta).join(""), final.output_text);
    assert.match(final.output_text, /Berlin/);

    const found = await other.responses.retrieve(final.id);
    assert.equal(found.output_text, final.output_text);
    assert.deepEqual(found.usage, final.usage);
    const more = await other.responses.create({
      ...fields, input: "And of Italy?", previous_response_id: final.id,
    });
    assert.equal(more.previous_response_id, final.id);
    assert.ok(more.usage.input_tokens > final.usage.total_tokens);
    await other.responses.delete(final.id);
    await assert.rejects(client.responses.retrieve(final.id), OpenAI.NotFoundError);
  },

  async response_parse() {
    const text = { format: zodTextFormat(Answer, "answer") };
    const response = await client.responses.parse({
      model, input: question, text, max_output_tokens: 60,
    });
    assert.deepEqual(Answer.parse(response.output_parsed), response.output_parsed);
  },

  async response_tool_loop() {
    const tools = [{ type: "function", name: "weather", parameters: city, strict: true }];
    const fields = { model, tools, temperature: 0 };
    const tool_choice = { type: "function", name: "weather" };
    const asked = await client.responses.create({
      ...fields, input: question, tool_choice, max_output_tokens: 40,
    });
    const [call] = asked.output;
    assert.equal(call.type, "function_call");
    assert.deepEqual(Object.keys(JSON.parse(call.arguments)), ["city"]);
    const result = { type: "function_call_output", call_id: call.call_id, output: "sunny" };
    const events = await collect(client.responses.create({
      ...fields, input: [result], previous_response_id: asked.id, tool_choice: "none",
      max_output_tokens: 8, stream: true,
    }));
    assert.ok(events.at(-1).response.output[0].content[0].text);
  },

  async errors() {
    await assert.rejects(chat({ temperature: 3 }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.param, "temperature");
      assert.ok(error.requestID);
      return true;
    });
    await assert.rejects(chat({ model: "other" }), (error) => {
      assert.ok(error instanceof OpenAI.NotFoundError);
      assert.equal(error.code, "model_not_found");
      return true;
    });
    assert.deepEqual((await client.models.list()).data.map(({ id }) => id), [model]);
  },
};

if (check === "names") console.log(Object.keys(checks).join("\n"));
else await checks[check]();
