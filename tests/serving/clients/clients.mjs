// node clients.mjs ADDRESS PROGRAM: asks a server; prints as JSON what a test (test_node_clients.py) then looks at.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, Output, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const [address, program] = process.argv.slice(2);
const question = "What is the weather in Oslo?";
const about = "The weather in a city, now.";
const city = z.enum(["Oslo", "Rome"]);

const weather = (given) => {
    if (given.city !== "Oslo") throw new Error(`asked about ${given.city}`);
    return "Rain, 7 degrees.";
};

const openai = new OpenAI({ baseURL: address, apiKey: "none", maxRetries: 0 });

async function openaiChat() {
    const parameters = z.toJSONSchema(z.object({ city }));
    const described = { type: "function", function: { name: "weather", description: about, parameters } };
    const given = { model: "demo", tools: [described], parallel_tool_calls: false, temperature: 0, max_tokens: 40 };
    const messages = [{ role: "user", content: question }];
    const first = await openai.chat.completions.create({ ...given, messages, tool_choice: "required" });
    const [{ message }] = first.choices;
    const [call] = message.tool_calls;
    messages.push(message, { role: "tool", tool_call_id: call.id, content: weather(JSON.parse(call.function.arguments)) });
    const second = openai.chat.completions.stream({ ...given, messages });
    return { answer: await second.finalContent() };
}

async function openaiResponses() {
    const parameters = z.toJSONSchema(z.object({ city }));
    const given = { model: "demo", parallel_tool_calls: false, temperature: 0, max_output_tokens: 40 };
    given.tools = [{ type: "function", name: "weather", description: about, parameters, strict: true }];
    const first = await openai.responses.create({ ...given, input: question, tool_choice: "required" });
    const [call] = first.output.filter((item) => item.type === "function_call");
    const output = { type: "function_call_output", call_id: call.call_id, output: weather(JSON.parse(call.arguments)) };
    const second = openai.responses.stream({ ...given, input: [output], previous_response_id: first.id });
    return { answer: (await second.finalResponse()).output_text };
}

const ofSdk = {
    compatible: createOpenAICompatible({ name: "nanovllm", baseURL: address, supportsStructuredOutputs: true })("demo"),
    chat: createOpenAI({ baseURL: address, apiKey: "none" }).chat("demo"),
    responses: createOpenAI({ baseURL: address, apiKey: "none" })("demo"),
};

async function sdk(model) {
    const given = { model, prompt: question, temperature: 0, maxOutputTokens: 40, maxRetries: 0 };
    const agent = {
        ...given,
        tools: { weather: tool({ description: about, inputSchema: z.object({ city }), execute: weather }) },
        providerOptions: { openai: { parallelToolCalls: false }, nanovllm: { parallel_tool_calls: false } },
        stopWhen: isStepCount(2),
        prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" }),
    };
    const { text } = await generateText(agent);
    const pieces = [];
    for await (const piece of streamText(agent).textStream) pieces.push(piece);
    const schema = z.object({ city, isWet: z.boolean() });
    const { output } = await generateText({ ...given, output: Output.object({ schema }) });
    return { answer: text, streamed: pieces.join(""), numPieces: pieces.length, report: output };
}

const programs = { openaiChat, openaiResponses };
for (const [name, model] of Object.entries(ofSdk)) programs[name] = () => sdk(model);
console.log(JSON.stringify(await programs[program]()));
