// `window.report`: the command that takes the picture reads it.
import { LoadingState } from '@grafana/data';
import {
  dataLayers,
  sceneGraph,
  SceneQueryRunner,
  SceneVariableSet,
  VizPanel,
  type SceneObject,
} from '@grafana/scenes';

/** One query as it was sent, and its result. */
export interface Asked {
  owner: string;
  refId: string;
  expr: string;
  series: number;
  error?: string;
}

/** The state of a panel on the page. */
interface Shown {
  title: string;
  drawn: boolean;
  empty: boolean;
}

const QUIET_FRAMES = 20;
// A panel's own drawing is wrapped in an element with this attribute; see panels.tsx.
export const DRAWING = 'data-drawing';

class Report {
  readonly asked: Asked[] = [];
  readonly problems: string[] = [];
  private scene?: SceneObject;
  private quiet = 0;

  /** Watch a scene and its element. */
  watch(scene: SceneObject, root: HTMLElement) {
    this.scene = scene;
    new MutationObserver(() => (this.quiet = 0)).observe(root, {
      attributes: true,
      characterData: true,
      childList: true,
      subtree: true,
    });
    const count = () => {
      this.quiet = this.pending().length === 0 ? this.quiet + 1 : 0;
      requestAnimationFrame(count);
    };
    requestAnimationFrame(count);
  }

  /** Whether every query has a response and the page has not changed for some frames. */
  settled(): boolean {
    return this.problems.length > 0 || this.quiet >= QUIET_FRAMES;
  }

  /** All data for the command's output and complaints. */
  summary() {
    return { asked: this.asked, problems: this.problems, panels: this.panels() };
  }

  /** The panels on the page, in order. */
  private panels(): Shown[] {
    const sections = document.querySelectorAll<HTMLElement>('section[data-testid*="Panel header"]');
    return [...sections].map((section) => {
      const drawing = section.querySelector<HTMLElement>(`[${DRAWING}]`);
      return {
        title: section.querySelector('h2')?.innerText ?? '',
        drawn: drawing !== null && drawing.offsetHeight > 0 && drawing.childElementCount > 0,
        empty: drawing?.innerText.includes('No data') ?? true,
      };
    });
  }

  /** The titles of panels whose responses are pending. */
  pending(): string[] {
    const open = (state?: LoadingState) => state !== LoadingState.Done && state !== LoadingState.Error;
    const names: string[] = [];
    for (const one of this.scene ? sceneGraph.findAllObjects(this.scene, () => true) : []) {
      if (one instanceof SceneQueryRunner && open(one.state.data?.state)) {
        names.push(ownerOf(one));
      } else if (one instanceof dataLayers.AnnotationsDataLayer && open(one.state.data?.state)) {
        names.push(one.state.name);
      } else if (one instanceof SceneVariableSet) {
        const waiting = one.state.variables.filter((each) => one.isVariableLoadingOrWaitingToUpdate(each));
        names.push(...waiting.map(({ state }) => state.name));
      }
    }
    return names;
  }
}

/** The title of the panel that an object belongs to; an annotation belongs to none. */
export function ownerOf(one?: SceneObject): string {
  return one instanceof VizPanel ? one.state.title : one ? ownerOf(one.parent) : 'annotations';
}

export const report = new Report();
Object.assign(window, { report });
window.addEventListener('error', ({ message }) => {
  // The browser reports this when something grows twice within a frame; the next frame draws it.
  if (!message.startsWith('ResizeObserver loop')) {
    report.problems.push(message);
  }
});
window.addEventListener('unhandledrejection', (event) => report.problems.push(String(event.reason)));
